"""The command line as users meet it: what it prints, and one line with exit code 2 for what they do wrong."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.cli import app
from tests.command_line import Refusals, run
from tests.random_models import byte_model
from triforce_core import __version__
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError, UnavailableError
from triforce_core.machine import cores
from triforce_core.machine.cpu import usable_cores
from triforce_core.models.files import load_tokenizer
from triforce_core.models.precision import machine_dtype
from triforce_tools.bench.machine import quiet_machine

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.py"
    path.write_text("def fibonacci(n):\n    if n < 2:\n        return n\n" * 20)
    return str(path)


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


FAST = ("--max-tokens", "24", "--dtype", "float32", "--threads", "1", "--json")


def generated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, object]:
    assert run(monkeypatch, "generate", *FAST, *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_is_the_same_whatever_the_tiers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    arguments = ("--prompt-file", prompt, "--temperature", "0.8", "--top-p", "0.9", "--seed", "3")
    plain, two, three = (
        generated(monkeypatch, capsys, *arguments, "--tiers", tiers)
        for tiers in ("target", "retrieval,target", "draft,retrieval,target")
    )
    assert plain["token_ids"] == two["token_ids"] == three["token_ids"]
    assert plain["text"] == two["text"] == three["text"]
    assert plain["usage"]["completion_tokens"] == len(plain["token_ids"]) <= 24
    assert plain["stats"]["tokens_per_round"] == 1
    assert plain["stats"]["acceptance"] == {"draft": None, "retrieval": None}
    assert three["stats"]["tokens_per_round"] > 1
    assert three["stats"]["acceptance"]["retrieval"] is not None
    assert three["stats"]["acceptance"]["draft"] is not None


def test_generate_is_the_same_wherever_the_kv_lies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, tmp_path: Path
) -> None:
    arguments = ("--prompt-file", prompt, "--temperature", "0.8", "--seed", "3")
    memory, host, disk = (
        generated(monkeypatch, capsys, *arguments, *offload)
        for offload in (
            (),
            ("--offload", "host", "--resident-layers", "1"),
            ("--offload", "disk", "--offload-path", str(tmp_path)),
        )
    )
    assert memory["token_ids"] == host["token_ids"] == disk["token_ids"]
    assert host["stats"]["tokens_per_round"] > 1


def test_generate_is_the_same_whatever_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    arguments = ("--prompt-file", prompt, "--temperature", "0", "--tiers")
    plain = generated(monkeypatch, capsys, *arguments, "target")
    lookup = generated(monkeypatch, capsys, *arguments, "draft,retrieval,target", "--drafter", "ngram")
    int8 = generated(monkeypatch, capsys, *arguments, "retrieval,target", "--self-drafter-quantization", "int8")
    assert plain["token_ids"] == lookup["token_ids"] == int8["token_ids"]
    assert lookup["stats"]["acceptance"]["draft"] > 0
    assert int8["stats"]["acceptance"]["retrieval"] > 0.5


def test_generate_is_the_same_whatever_selects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    arguments = ("--prompt-file", prompt, "--temperature", "0.8", "--seed", "3", "--budget", "64")
    mean_key, h2o = (generated(monkeypatch, capsys, *arguments, "--selector", name) for name in ("mean_key", "h2o"))
    assert mean_key["token_ids"] == h2o["token_ids"]
    assert mean_key["stats"]["snapshots"] > 0 < h2o["stats"]["snapshots"]
    assert run(monkeypatch, "generate", *FAST, *arguments, "--selector", "best") != 0
    assert re.search(r"retrieval\.selector: '?best'? .*mean_key", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["mean_key", "snapkv", "h2o"])
def test_generate_is_the_same_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, selector: str, tmp_path: Path
) -> None:
    config = tmp_path / "pinned.yaml"  # the controller's choices depend on times, and acceptance on these choices
    config.write_text(f"speculation: {{controller: off}}\nretrieval: {{budget: 64, selector: {selector}}}\n")
    arguments = ("--prompt-file", prompt, "--temperature", "0.8", "--seed", "3", "--config", str(config))
    whole = generated(monkeypatch, capsys, *arguments)
    divided = generated(monkeypatch, capsys, *arguments, "--tensor-parallel", "2")
    assert divided["token_ids"] == whole["token_ids"]
    assert divided["stats"]["acceptance"] == whole["stats"]["acceptance"]
    assert not multiprocessing.active_children()


def test_another_seed_gives_another_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    one, other = (generated(monkeypatch, capsys, "--prompt-file", prompt, "--seed", seed) for seed in ("1", "2"))
    assert one["token_ids"] != other["token_ids"]


def streamed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The text that is shown, without the legend below it."""
    assert run(monkeypatch, "generate", *FAST[:-1], *arguments) == 0
    return capsys.readouterr().out.removesuffix("\n").rpartition("\n")[0]


def test_the_text_streams_as_it_would_be_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("größe = 'Überprüfung – 你好 🙂'\n\tprint(größe)\n" * 20, encoding="utf-8")
    random_bytes = ("--target", byte_model(tmp_path / "model"), "--tiers", "retrieval,target", "--max-tokens", "200")
    for arguments in (), random_bytes:
        given = ("--prompt-file", str(prompt), *arguments)
        text = generated(monkeypatch, capsys, *given)["text"]
        assert streamed(monkeypatch, capsys, *given) == text
    characters = set(text)  # of the random bytes
    assert characters & set("\t\r\a\b\v\f")
    assert any("\x80" <= character < "\N{REPLACEMENT CHARACTER}" for character in characters)
    assert "\N{REPLACEMENT CHARACTER}" in characters


def test_half_a_character_at_the_end_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, tmp_path: Path
) -> None:
    model = byte_model(tmp_path / "model")
    arguments = ("--prompt-file", prompt, "--tiers", "target", "--target", model)
    tokens, decode = generated(monkeypatch, capsys, *arguments)["token_ids"], load_tokenizer(model).decode
    length = next(n for n in range(8, 24) if decode(tokens[:n]).endswith("\N{REPLACEMENT CHARACTER}"))
    cut = (*arguments, "--max-tokens", str(length))
    assert generated(monkeypatch, capsys, *cut)["text"] == decode(tokens[:length])
    assert streamed(monkeypatch, capsys, *cut) == decode(tokens[:length])


def test_the_end_of_sequence_token_is_no_part_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, tmp_path: Path
) -> None:
    arguments = ("--prompt-file", prompt, "--tiers", "retrieval,target", "--target")
    endless = generated(monkeypatch, capsys, *arguments, byte_model(tmp_path / "endless"))
    tokens = endless["token_ids"]
    assert (endless["finish_reason"], len(tokens)) == ("length", 24)
    length = next(i for i, token in enumerate(tokens) if i >= 8 and token not in tokens[:i])
    ending = byte_model(tmp_path / "ending", eos=tokens[length])
    ended = generated(monkeypatch, capsys, *arguments, ending)
    assert (ended["finish_reason"], ended["token_ids"]) == ("stop", tokens[:length])
    assert ended["usage"]["completion_tokens"] == length
    assert ended["text"] == load_tokenizer(ending).decode(tokens[:length])
    assert streamed(monkeypatch, capsys, *arguments, ending) == ended["text"]


def test_a_terminal_gets_no_control_characters_of_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompt.py"
    path.write_text("\x1b]0;title\x07def f():\n\treturn '\x9b31m'\n")
    arguments = ("--prompt-file", str(path), "--max-tokens", "1", "--echo")
    assert run(monkeypatch, "generate", *FAST[2:-1], *arguments) == 0
    assert capsys.readouterr().out.startswith(path.read_text())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(monkeypatch, "generate", *FAST[2:-1], *arguments) == 0
    assert capsys.readouterr().out.startswith("]0;titledef f():\n\treturn '31m'\n")


def test_a_single_token_has_no_time_between_tokens_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    assert run(monkeypatch, "generate", *FAST[:-1], "--prompt-file", prompt, "--max-tokens", "1") == 0
    assert "prefill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt-file", "/nowhere/at/all"], ["prompt-file", "/nowhere/at/all", "No such file"]),
        (["--temperature", "-1"], ["temperature", "-1", "between 0 and"]),
        (["--top-p", "0"], ["top_p", "0", "above 0"]),
        (["--budget", "63", "--chunk", "8"], ["budget", "63", "multiple of chunk 8"]),
        (["--lookaheads", "8"], ["lookaheads", "8", "two whole numbers"]),
        (["--lookaheads", "65,1"], ["lookaheads", "65", "between 0 and 64"]),
        (["--tiers", "draft"], ["tiers", "draft", "retrieval,target"]),
        (["--target", "/nowhere"], ["target", "/nowhere", "config.json"]),
        (["--offload", "tape"], ["target.offload", "'tape'", "'none', 'host' or 'disk'"]),
        (["--resident-layers", "2"], ["resident_layers 2 must be 0 where offload is none"]),
        (["--offload", "host", "--resident-layers", "99"], ["target.resident_layers", "99", "layers"]),
        (["--offload", "disk"], ["offload_path must name a directory"]),
        (
            ["--offload", "disk", "--offload-path", "/nowhere"],
            ["target.offload_path", "/nowhere", "must be a directory"],
        ),
        (["--threads", "0"], ["threads", "0", "greater than or equal to 1"]),
        (["--device", "nowhere"], ["device", "nowhere", "must be cpu, cuda or cuda:N"]),
        (["--device", "cuda:99"], ["device", "cuda:99", "PyTorch"]),
        (["--dtype", "int3"], ["dtype", "int3", "bfloat16"]),
        (["--max-tokens", "many"], ["max-tokens", "integer"]),
        (["--max-tokens", "0"], ["max_tokens", "0", "at least 1"]),
        (["--max-tokens", "20000"], ["prompt", "20000 output tokens", "context of 16384"]),
        (["--seed", str(2**63)], ["--seed", str(2**63 - 1)]),
        (["--config", "/nowhere.yaml"], ["config", "/nowhere.yaml", "No such file"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--presence-penalty", "3"], ["presence_penalty", "3.0", "between -2 and 2"]),
        (["--logit-bias", "five=1"], ["logit-bias", "five=1", "ID=NUMBER"]),
        (["--logit-bias", "5000=1"], ["logit_bias", "5000", "below 4096"]),
        (["--min-tokens", "200"], ["min_tokens", "200", "at most max_tokens, 128"]),
        (["--stop", ""], ["stop", "''", "must not be an empty string"]),
        (["--regex", "(?=a)"], ["regex", "(?=a)", "cannot be compiled", "look-around"]),
        (["--regex", "a", "--choice", "b"], ["guide", "regex", "choice", "at most one of --json-schema"]),
        (["--regex", ""], ["regex", "0 characters", "must have 1 to"]),
        (["--json-schema", "/dev/null"], ["json_schema", "0 characters", "must have 1 to"]),
        (["--grammar", "/dev/null"], ["grammar", "0 characters", "must have 1 to"]),
        (["--regex", "a", "--ignore-eos"], ["ignore-eos", "True", "cannot be combined with --json-schema"]),
        (
            ["--choice", "red", "--min-tokens", "9", "--json"],
            ["choice", "red", "allows no token after", "output tokens"],
        ),
        (["--json-schema", "/nowhere.json"], ["json-schema", "/nowhere.json", "No such file"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refusals: Refusals, prompt: str, arguments: list[str], named: list[str]
) -> None:
    refusals.check(named, "generate", "--prompt-file", prompt, *arguments)


def test_generate_obeys_a_form_and_gives_logprobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, tmp_path: Path
) -> None:
    schema, arguments = tmp_path / "schema.json", ("--prompt-file", prompt, "--temperature", "0.8", "--echo")
    schema.write_text('{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}')
    given = Path(prompt).read_text()
    answer = generated(
        monkeypatch, capsys, *arguments, "--regex", "[0-9]{3}", "--logprobs", "2", "--prompt-logprobs", "0"
    )
    assert re.fullmatch("[0-9]{3}", answer["text"].removeprefix(given))
    assert len(answer["logprobs"]) == len(answer["token_ids"]) == answer["usage"]["completion_tokens"]
    assert all(len(each["top"]) == 2 for each in answer["logprobs"])
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    answer = generated(monkeypatch, capsys, *arguments, "--json-schema", str(schema), "--max-tokens", "100")
    assert answer["text"].startswith(given + '{"on": ')
    answer = generated(monkeypatch, capsys, *arguments, "--choice", "red", "--choice", "green")
    assert (answer["text"].removeprefix(given) in ("red", "green"), answer["finish_reason"]) == (True, "stop")


def test_generate_writes_several_completions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    arguments = ("--prompt-file", prompt, "--temperature", "0.8")
    assert run(monkeypatch, "generate", *FAST, *arguments, "--n", "3", "--seed", "4") == 0
    several = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({each["text"] for each in several}) == 3
    assert several[0]["seed"] == 4
    alone = generated(monkeypatch, capsys, *arguments, "--seed", str(several[2]["seed"]))
    assert alone["token_ids"] == several[2]["token_ids"]
    stop = several[0]["text"][10:13]
    cut = generated(monkeypatch, capsys, *arguments, "--seed", "4", "--stop", stop)
    assert cut["text"] == several[0]["text"][: several[0]["text"].find(stop)]
    assert cut["finish_reason"] == "stop"


def test_serve_takes_offload_too(refusals: Refusals) -> None:
    path = ("--offload-path", "/x")
    refusals.check(["resident_layers 2 must be 0"], "serve", "--resident-layers", "2")
    refusals.check(["offload_path '/x' must be null where offload is host"], *("serve", "--offload", "host"), *path)


@pytest.mark.parametrize("command", [("serve",), ("bench", "pipeline", "--force")])
def test_cores_that_cannot_be_kept_awake_are_refused_at_once(
    refusals: Refusals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cores, "CPU_LATENCY", tmp_path / "missing")
    refusals.check(["placement.cpu_latency_us: 7 cannot be asked", "No such file"], *command, "--cpu-latency-us", "7")


def test_a_trace_that_cannot_be_written_is_refused_before_a_pipeline_is_measured(refusals: Refusals) -> None:
    path = "/nowhere/trace.json"
    refusals.check(["trace", path, "is in a directory that does not exist"], "bench", "pipeline", "--trace", path)


def test_an_empty_and_a_binary_prompt_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for content, rule in ((b"", "must not be empty"), (b"\xff\xfe\x00", "not UTF-8")):
        path = tmp_path / "prompt"
        path.write_bytes(content)
        assert run(monkeypatch, "generate", "--prompt-file", str(path)) == 2
        assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--settings", "/nowhere.yaml"], ["settings", "/nowhere.yaml", "No such file"]),
        (["train", "--settings", "prompt.py"], ["seed", "Field required"]),
        (["train", "--device", "nowhere"], ["device", "nowhere", "must be cpu"]),
        (["train", "--threads", "0"], ["threads", "0", "at least 1"]),
        (["export", "weights"], ["cache_dir", "holds no checkpoint of the target"]),
    ],
)
def test_the_demo_s_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals, prompt: str, arguments: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(Path(prompt).parent)
    monkeypatch.setenv("HOME", str(Path(prompt).parent))  # where no pair was ever trained
    refusals.check(named, "demo", *arguments)


def test_without_the_demo_pair_only_the_commands_that_need_it_are_refused(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals, prompt: str
) -> None:
    monkeypatch.setitem(sys.modules, "triforce_serve_demo", None)  # its import raises what that of no package raises
    named = ["target", "'demo'", f"pip install triforce-serve-demo=={__version__}"]
    for arguments in (["generate", "--prompt-file", prompt], ["demo", "train"]):
        refusals.check(named, *arguments)
    hidden = "import sys; sys.modules['triforce_serve_demo'] = None; sys.argv = ['triforce', 'config']"
    fresh = [sys.executable, "-c", f"{hidden}; from deploy.cli import main; main()"]
    assert "model: demo" in subprocess.run(fresh, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("name", ["bench", "demo", "eval"])
def test_without_the_tools_their_commands_say_what_to_install(name: str) -> None:
    hidden = (
        "import importlib.metadata as m, sys; m.entry_points = lambda **_: (); sys.modules['triforce_tools'] = None"
    )
    command = f"{hidden}; from deploy.cli import main; sys.argv = ['triforce', '{name}', 'some', '--thing']; main()"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"triforce: command: '{name}' is one of the tools: pip install 'triforce-serve[tools]'\n"


def test_tools_of_another_version_stop_no_other_command() -> None:
    """An entry point whose module lacks what the server's package no longer has."""
    older = (
        "import importlib.metadata as m, sys; EntryPoint = m.EntryPoint;"
        " m.entry_points = lambda **_: (EntryPoint('bench', 'triforce_core.errors:gone', 'triforce.commands'),);"
        " from deploy.cli import main; sys.argv = ['triforce', *sys.argv[1:]]; main()"
    )

    def run_with(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", older, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run_with("--version").stdout == f"{__version__}\n"
    refused = run_with("bench", "sweep")
    assert refused.returncode == 2
    assert "pip install 'triforce-serve[tools]' of this version: " in refused.stderr
    assert "gone" in refused.stderr


def test_an_interrupted_command_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "load_settings", interrupt)
    assert run(monkeypatch, "config") == 130
    assert capsys.readouterr() == ("", "")


def test_config_prints_what_config_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("retrieval: {budget: 256}\nspeculation: {lookaheads: [5, 2]}\nplacement: {colocate: auto}\n")
    assert run(monkeypatch, "config", "--config", str(path)) == 0
    printed = capsys.readouterr().out
    path.write_text(printed)
    assert load_settings(path).retrieval.budget == yaml.safe_load(printed)["retrieval"]["budget"] == 256
    assert load_settings(path).speculation.lookaheads == (5, 2)
    assert run(monkeypatch, "config", "--config", str(path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["speculation"]["lookaheads"] == [5, 2]
    assert told["dtype"] == machine_dtype("cpu"), "auto, as what it is here"
    assert told["placement"]["colocate"] == ("all" if usable_cores() < 3 else "none")


def test_two_benchmarks_never_run_at_once_nor_on_a_busy_machine() -> None:
    with (
        quiet_machine(0, force=True),
        pytest.raises(UnavailableError, match="another benchmark"),
        quiet_machine(0, force=True),
    ):
        pass
    with pytest.raises(InvalidValueError, match="load average"), quiet_machine(-1, force=False):
        pass
