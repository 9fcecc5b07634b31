"""A template cannot take the server's time and memory without bound."""

from pathlib import Path

import pytest

from serving import template_sandbox
from serving.chat_template import ChatTemplate, ChatTemplateError
from serving.errors import ReleaseError
from serving.template_sandbox import MAX_LENGTH, TooCostly
from serving.tokenizer import load_tokenizer
from tests.serving_fixtures import echo_release

MESSAGES = [{"role": "user", "content": "Hi"}] * 3
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}X{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": FOREVER,
    "silent loops": FOREVER.replace("X", ""),
    "loops over messages": "".join(f"{{% for m{n} in messages %}}" for n in range(19))
    + "{% endfor %}" * 19,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "a loop that calls itself": (
        "{% for m in messages recursive %}{% if loop.depth < 90 %}{{ loop(messages) }}{% endif %}"
        "{% endfor %}"
    ),
}
HUGE = {
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a text": "{{ 10**9 * 'x' }}",
    "a list times a number": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10 ** 10000000000 }}",
    "a product of powers": "{% set n = 2 ** 9999999 %}{{ n * n }}",
    "sums": "{% set ns = namespace(x='xx') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joined texts": "{% set ns = namespace(x='xx') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "blocks": "{% set ns = namespace(x='xx') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "texts of macros": (
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}xx{% endif %}"
        "{% endmacro %}{% set y = f(60) %}"
    ),
    "output": "{% set x = 'x' * 10**6 %}" + "{% for i in range(9999) %}{{ x }}{% endfor %}",
}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_SECONDS", 0.05)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_rendering_without_end_is_ended(brief: None, name: str) -> None:
    with pytest.raises(TooCostly, match=r"0\.05 seconds"):
        ChatTemplate(ENDLESS[name], {}).render(MESSAGES)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HUGE)
def test_a_text_without_bound_is_refused(name: str) -> None:
    with pytest.raises(TooCostly, match=str(MAX_LENGTH)):
        ChatTemplate(HUGE[name], {}).render(MESSAGES)


def test_a_macro_that_never_ends_is_refused() -> None:
    template = ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {})
    with pytest.raises(ChatTemplateError, match="recursion"):
        template.render(MESSAGES)


def test_checked_loops_and_texts_are_what_they_were() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{{ loop.previtem is defined }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k ~ v }}{% endfor %}"
        "{% for x in missing %}{% else %}empty{% endfor %}"
        "{% set block %}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 1.5 * 2 }}{% endset %}"
        "{{ block }}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES) == (
        "1/3,False2/3,True3/3Truea1empty8abab[1, 2]3.0"
    )


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    deep = "".join(f"{{% for m{n} in messages %}}" for n in range(40)) + "{% endfor %}" * 40
    with pytest.raises(ReleaseError, match="chat_template"):
        ChatTemplate(deep, {})


@pytest.mark.timeout(30)
def test_a_release_whose_template_never_ends_is_refused(tmp_path: Path, brief: None) -> None:
    release = echo_release(tmp_path, 1, chat_template=FOREVER)
    with pytest.raises(ReleaseError, match=r"chat_template: .* one short message"):
        load_tokenizer(tmp_path / release.id)


def test_a_template_may_refuse_a_plain_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = echo_release(tmp_path, 1, chat_template="{{ raise_exception('only tools here') }}")
    assert load_tokenizer(tmp_path / release.id).chat_template is not None
    assert "only tools here" in caplog.text
