"""Chat templates: rendered as their models expect, and harmless whatever they hold."""

from __future__ import annotations

import json
import types
from datetime import datetime

import pytest

from pocketllm.checkpoint import Checkpoint, GenerationDefaults, open_checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.text.chat_template import ChatTemplate, load_chat_template

HI = [{"role": "user", "content": "hi"}]


def render(source, messages=HI, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def refusal(source, messages=HI, **options):
    with pytest.raises(ConfigurationError) as caught:
        render(source, messages, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_the_default_model(default_model):
    template = load_chat_template(open_checkpoint(default_model))
    assert template is not None
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert template.render(HI) == system + turn + "<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == system + turn
    assert template.render([{"role": "system", "content": "Be brief."}, *HI], False) == "<|im_start|>system\nBe brief.<|im_end|>\n" + turn


def test_variables_and_options():
    source = "{{ bos_token }}{{ messages[0].content }}{{ thinking }}{{ tools | length }}{{ add_generation_prompt }}{{ eos_token }}"
    assert render(source, tools=[{}, {}], thinking=False) == "<s>hiFalse2True</s>"
    assert render("{{ tools is none }}{{ unheard_of is defined }}") == "TrueFalse"


def test_blocks_leave_no_white_space_and_loops_can_break():
    assert render("{% for m in [1, 2, 3] %}\n    {% if m == 2 %}{% break %}{% endif %}\n{{ m }}\n{% endfor %}\nend") == "1\nend"


def test_tojson_is_plain_json():
    content = {"b": "<é'>", "a": [1, None]}
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": content}]) == json.dumps(content, ensure_ascii=False)
    assert render("{{ messages[0].content | tojson(indent=1, sort_keys=true) }}", [{"content": {"b": 1, "a": 2}}]) == '{\n "a": 2,\n "b": 1\n}'


def test_generation_blocks_strftime_dict_and_namespace():
    assert render("{% set x = 1 %}{% generation %}a{{ x }}{% endgeneration %}b") == "a1b"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ dict(a=1).a }}{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "12"


def test_keys_that_are_none_count_as_absent():
    assert render("{{ messages[0].tool_calls is defined }}", [{"role": "assistant", "content": "", "tool_calls": None}]) == "False"


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    before = json.dumps(messages)
    refusal("{{ messages.append(1) }}", messages)
    refusal("{{ messages[0].update(role='x') }}", messages)
    assert render("{% set m = messages[0] %}{{ m.content[0].text }}", messages) == "hi"
    assert json.dumps(messages) == before


def test_the_templates_own_refusal_is_passed_on():
    assert refusal("{{ raise_exception('Only user\nand system roles!') }}").endswith("refuses the messages: Only user and system roles!")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('false') }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__base__.__name__}'.format(1) }}",
        "{{ ''['__cl' ~ 'ass__'].mro() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ self.__init__.__globals__ }}{{ 1 / 0 }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ messages() }}",
        "{{ 1 / 0 }}",
        "{{ 'x' | int(base=99) }}{{ [] | first + 1 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'secret' %}",
        "{% import 'os' as os %}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{{ strftime_now(3) }}",
        "{{ messages | map(attribute='__class__') | list | first + 1 }}",
    ],
)
def test_a_hostile_or_broken_template_ends_in_a_refusal(source):
    refusal(source)


def test_objects_do_not_reach_the_template():
    assert "not a JSON value" in refusal("x", [{"role": "user", "content": types.SimpleNamespace(text="hi")}])
    assert "not a JSON value" in refusal("x", option=object())


def test_messages_that_hold_themselves_are_refused():
    loop: list[object] = []
    loop.append(loop)
    refusal("x", [{"role": "user", "content": loop}])


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ messages", "{% generation %}", "{% unheard_of %}", "{{ x | unheard_of }}", "{% break %}", "{{ " + "(" * 5000]
)
def test_a_template_that_is_no_jinja_is_refused_when_it_loads(source):
    with pytest.raises(ConfigurationError, match="not valid Jinja") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


@pytest.fixture
def directory(tmp_path):
    return Checkpoint(tmp_path, "safetensors", "m", "llama", {}, 0, GenerationDefaults(), ())


def test_where_a_directory_keeps_its_template(directory):
    assert load_chat_template(directory) is None
    config = directory.path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<b>", "chat_template": "{{ bos_token }}1"}))
    assert load_chat_template(directory).render(HI) == "<b>1"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]}))
    assert load_chat_template(directory).render(HI) == "3"
    (directory.path / "chat_template.jinja").write_text("4")
    assert load_chat_template(directory).render(HI) == "4"


def test_a_directory_with_an_unusable_template(directory):
    config = directory.path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "2"}]}))
    with pytest.raises(ConfigurationError, match="rag and no default"):
        load_chat_template(directory)
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ConfigurationError, match="no text"):
        load_chat_template(directory)
    (directory.path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja can't be read"):
        load_chat_template(directory)


def test_a_base_model_has_none(write_gguf):
    assert load_chat_template(open_checkpoint(write_gguf(tokenizer__chat_template=None))) is None


CALL = {"id": "call_0001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROUND = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0001", "content": "2"},
]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_CALLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}{% for k, v in c.function.arguments|items %} {{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"
)
TEXT_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
TWO_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def traits(source):
    return ChatTemplate(source, {}).traits


def test_what_a_template_renders_is_found_out():
    plain = traits(TURNS)
    assert (plain.renders_tools, plain.renders_tool_calls, plain.renders_tool_results, plain.renders_developer) == (False, False, True, False)
    known = traits(WITH_CALLS)
    assert (known.renders_tools, known.renders_tool_calls, known.renders_tool_results, known.text_arguments) == (True, True, True, False)
    assert traits(TEXT_CALLS).text_arguments
    strict = traits(TWO_ROLES)
    assert (strict.renders_tool_calls, strict.renders_tool_results) == (False, False)
    assert traits(TURNS + "{% if messages[0].role == 'developer' %}!{% endif %}").renders_developer
    broken = traits("{{ messages[9].content }}")
    assert (broken.renders_tools, broken.renders_tool_calls, broken.renders_tool_results) == (False, False, False)


def test_arguments_reach_the_template_in_the_form_that_it_takes():
    before = json.dumps(ROUND)
    assert render(WITH_CALLS, ROUND, tools=[TOOL]) == "[add]<user>1 + 1?<assistant>(add a=1 b=é)<tool>2"
    assert render(TEXT_CALLS, ROUND) == '<user>1 + 1?<assistant>add{"a": 1, "b": "é"}<tool>2'
    as_object = [ROUND[0], {**ROUND[1], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]}, ROUND[2]]
    assert render(TEXT_CALLS, as_object) == '<user>1 + 1?<assistant>add{"a": 1}<tool>2'
    for nothing in ("", "null", None, "{}"):
        chat = [ROUND[0], {**ROUND[1], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": nothing}}]}]
        assert render(WITH_CALLS, chat) == "<user>1 + 1?<assistant>(add)"
    assert json.dumps(ROUND) == before


def test_calls_that_a_template_drops_become_text():
    line = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
    assert render(TURNS, ROUND) == f"<user>1 + 1?<assistant>{line}<tool>2"
    said = [ROUND[0], {**ROUND[1], "content": "Let me see."}]
    assert render(TURNS, said) == f"<user>1 + 1?<assistant>Let me see.\n{line}"


def test_results_that_a_template_refuses_become_a_turn_of_the_user():
    line = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
    other = {"role": "tool", "tool_call_id": "unknown", "content": "3"}
    chat = [*ROUND, other, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "2."}, {"role": "user", "content": "Thanks"}]
    joined = "The call of add returned:\n2\n\nThe call returned:\n3\n\nAnd?"
    assert render(TWO_ROLES, chat) == f"<user>1 + 1?<assistant>{line}<user>{joined}<assistant>2.<user>Thanks"


def test_developer_is_system_where_the_template_has_no_such_role():
    chat = [{"role": "developer", "content": "Be brief."}, *HI]
    assert render(TURNS, chat) == "<system>Be brief.<user>hi"
    assert render(TURNS + "{% if messages[0].role == 'developer' %}!{% endif %}", chat) == "<developer>Be brief.<user>hi!"


def test_the_default_model_keeps_calls_and_results(default_model):
    template = load_chat_template(open_checkpoint(default_model))
    assert not template.renders_tools
    text = template.render(ROUND, tools=[TOOL])
    assert '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1, "b": "é"}}<|im_end|>' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text
    assert template.render(HI, tools=[]) == template.render(HI, tools=None) == template.render(HI)


# The vocabularies of real templates: every effort that a caller may name, and the word that reaches the template.
REFUSING = (
    "{% set effort = reasoning_effort | default('xhigh') %}{% if effort == 'high' %}{% set effort = 'xhigh' %}{% endif %}"
    "{% if effort not in ['xhigh', 'medium', 'low'] %}{{ raise_exception('no such effort') }}{% endif %}{{ effort }}"
)
THREE = "{% if reasoning_effort in ('low', 'medium', 'high') %}{{ reasoning_effort }}{% endif %}"
UPPER = "{% if reasoning_effort is defined and reasoning_effort == 'high' %}H{% elif reasoning_effort == 'max' %}M{% endif %}"
LOOKED_UP = "{{ {'low': 1, 'high': 2}[reasoning_effort] + 1 }}"
ECHO = "{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (REFUSING, {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh", "none": "xhigh"}),
        (THREE, {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high", "none": ""}),
        (UPPER, {"minimal": "", "low": "", "medium": "", "high": "H", "xhigh": "M", "max": "M", "none": ""}),
        (LOOKED_UP, {"minimal": "2", "low": "2", "medium": "3", "high": "3", "xhigh": "3", "max": "3"}),
        (ECHO, {"minimal": "minimal", "high": "high", "max": "max", "none": ""}),
        ("{{ reasoning_effort == 'none' }}", {"none": "True", "low": "False"}),
        ("x", {"none": "x", "max": "x"}),
    ],
    ids=["refusing", "three", "upper", "looked up", "echo", "none", "absent"],
)
def test_efforts_are_said_in_the_words_of_the_template(source, expected):
    template = ChatTemplate(source, {})
    assert {effort: template.render(HI, reasoning_effort=effort) for effort in expected} == expected


# Case 36 of the bug reports, on a template with the rules of Qwen3.5.
@pytest.mark.parametrize("roles", [("system", "system", "user"), ("user", "system", "user"), ("developer", "system", "user")])
def test_a_late_system_message_is_a_refusal_in_the_templates_words(roles):
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
        "{% endif %}{{ m.role }}{% endfor %}"
    )
    assert "System message must be at the beginning" in refusal(source, [{"role": role, "content": "a"} for role in roles])
    assert render(source, [{"role": "developer", "content": "a"}, *HI]) == "systemuser"


def test_text_that_is_no_unicode_is_a_refusal():
    refusal("{{ tools[0].function.description }}", tools=[{"type": "function", "function": {"name": "f", "description": "\ud800"}}])
