"""`Start`: the weights that a job sets out from, and what it does with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.retrain.base_model import PRESETS, base_folder
from pipeline.retrain.checkpoint import Checkpoint, is_finished
from pipeline.retrain.data import Data
from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.evaluate import Evaluation, compare
from pipeline.retrain.export import export, round_weights
from pipeline.retrain.gate import are_too_few
from pipeline.retrain.job import Job
from pipeline.retrain.lessons import prepare
from pipeline.retrain.lora import lora
from pipeline.retrain.noise import count_noise
from pipeline.retrain.parent import Parent
from pipeline.retrain.probe import make_probe, probe_texts
from pipeline.retrain.processes import rank, train_in_processes
from pipeline.retrain.reporters import open_reporters
from pipeline.retrain.scoring import check_head, row_losses
from pipeline.retrain.tokens import Sequence, sequences
from pipeline.retrain.train import train
from serving.weights.release import Lineage, Release

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRESET_LENGTH, DEFAULT_LENGTH = 256, 1_024


@dataclass(frozen=True, kw_only=True)
class Start:
    model: "PreTrainedModel"
    """In float32; trained in place."""
    tokenizer: "PreTrainedTokenizerBase"
    folder: Path
    """Where both come from: the parent release's, for a delta, or the base model's."""
    served_folder: Path
    """Of what the new weights are measured against."""
    served_name: str
    dtype: torch.dtype
    """That the weights are stored in."""
    max_length: int
    data: Data
    tokens_before: int
    """That the parent was trained on, from its base model on."""

    def train(self, job: Job) -> Checkpoint:
        """Leaves the best weights in `model`, with the values that they are stored with."""
        count = job.settings.train.num_processes
        if count > 1:
            train_in_processes(job, count)
        # Where processes did the work, their checkpoint is finished, and only loaded here.
        checkpoint = self.train_here(job)
        round_weights(self.model, self.dtype)
        return checkpoint

    def train_here(self, job: Job) -> Checkpoint:
        """The same in this process, or as one of several, without rounding."""
        settings = job.settings
        lessons = prepare(
            self.data,
            self.tokenizer,
            settings,
            max_length=self.max_length,
            tokens_before=self.tokens_before,
        )
        reports_here = rank() == 0 and not is_finished(job.dir)
        with (
            lora(self.model, settings.train),
            open_reporters(
                settings.train.report_to if reports_here else (),
                folder=job.dir,
                pipeline=settings.pipeline,
                job_id=job.id,
            ) as reports,
            job.metrics.reporting_to(reports),
        ):
            return train(
                self.model,
                lessons,
                settings.train,
                job_dir=job.dir,
                job_id=job.id,
                metrics=job.metrics,
            )

    def evaluate(self, job: Job, checkpoint: Checkpoint) -> Evaluation:
        gate = job.settings.gate
        groups = self._held_out(self.tokenizer)
        new = row_losses(self.model, groups[0]), row_losses(self.model, groups[1])
        noise = count_noise(self.model, *groups, losses=new)
        served, tokenizer, _ = load_model(self.served_folder)
        groups = self._held_out(tokenizer)
        old = row_losses(served, groups[0]), row_losses(served, groups[1])
        if are_too_few(*noise, gate):
            # All of the new range then, under the weights that have learned none of it: the new
            # ones know the order of what they were trained on, noise or not.
            rows = (*self.data.held_out_new, *self.data.new)
            all_new = sequences(rows, tokenizer, self.max_length)
            losses = row_losses(served, all_new), old[1]
            noise = count_noise(served, all_new, groups[1], losses=losses)
        return compare(
            new,
            old,
            noise,
            gate,
            num_lost=self.data.num_lost,
            num_before=self.data.num_before,
            is_removal=self.data.is_removal,
            against=self.served_name,
            tokens=checkpoint.tokens,
            tokens_before=self.tokens_before if self.data.mode == "delta" else 0,
        )

    def export(self, job: Job, evaluation: Evaluation, lineage: Lineage) -> Release:
        groups = (self.data.held_out_new, self.data.new, self.data.held_out_known, self.data.known)
        probe = make_probe(self.model, probe_texts(groups, self.tokenizer, self.max_length))
        return export(
            self.model,
            self.dtype,
            pipeline_dir=job.pipeline_dir,
            files_dir=self.folder,
            lineage=lineage,
            evaluation=evaluation,
            probe=probe,
        )

    def _held_out(
        self, tokenizer: "PreTrainedTokenizerBase"
    ) -> tuple[list[Sequence], list[Sequence]]:
        """The held-out rows of the new range, and those known before."""
        return (
            sequences(self.data.held_out_new, tokenizer, self.max_length),
            sequences(self.data.held_out_known, tokenizer, self.max_length),
        )


def open_start(job: Job, data: Data, parent: Parent | None) -> Start:
    """Load what the job sets out from. Raises BaseModelError."""
    settings = job.settings
    on_own_hub = settings.base_model_endpoint == "hub"
    _prepare_libraries(job)

    def base() -> Path:
        return base_folder(
            settings.base_model,
            settings.bases_dir / settings.pipeline,
            data.rows,
            seed=settings.train.seed,
            endpoint=job.hub_endpoint if on_own_hub else settings.base_model_endpoint,
            token=job.hub_token if on_own_hub else job.base_model_token,
        )

    folder = parent.folder if parent is not None and data.mode == "delta" else base()
    model, tokenizer, dtype = load_model(folder)
    check_head(model)
    return Start(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        served_folder=parent.folder if parent is not None else folder,
        served_name=parent.id if parent is not None else settings.base_model,
        dtype=dtype,
        max_length=min(
            settings.train.max_length
            or (PRESET_LENGTH if settings.base_model in PRESETS else DEFAULT_LENGTH),
            getattr(model.config, "max_position_embeddings", DEFAULT_LENGTH),
        ),
        data=data,
        tokens_before=int(parent.evaluation.get("total_tokens", 0)) if parent is not None else 0,
    )


def _prepare_libraries(job: Job) -> None:
    """Threads as the runner granted them: a process forked from a warm parent has read no
    environment of its own. And no progress bars in the log."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)


def load_model(
    folder: Path,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]":
    """Weights in float32, tokenizer, and the dtype that the weights are stored in.

    Raises BaseModelError for a folder that holds no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BaseModelError(f"{folder} cannot be loaded as a causal model: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"the tokenizer in {folder} has no end-of-sequence token; add one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device), tokenizer, config.dtype or torch.float32
