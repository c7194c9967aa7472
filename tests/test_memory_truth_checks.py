"""What is refused, guessed or doubted of a real start-up and of a correction, and what Python may give the planner."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import windtunnel as wt
from windtunnel import memory_inputs
from windtunnel.cli.main import main
from windtunnel.memory_inputs import MemoryInputUnreadable
from windtunnel.sim.deployment.model import read_model_config

MODEL = "llama-3.1-8b"
ENGINE = (
    "(EngineCore pid=9) INFO 03-02 10:00:01 [core.py:97] Initializing a V1 LLM engine (v0.19.0) with config: "
    "model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1\n"
)
AVAILABLE = "(EngineCore pid=9) INFO 03-02 10:00:40 [gpu_worker.py:298] Available KV cache memory: {gib} GiB\n"
TOKENS = "(EngineCore pid=9) INFO 03-02 10:00:40 [kv_cache_utils.py:1087] GPU KV cache size: {tokens:,} tokens\n"
WHOLE = ENGINE + AVAILABLE.format(gib="54.00") + TOKENS.format(tokens=442_368)
SERVES = "(APIServer pid=1) INFO:     Application startup complete.\n"
OUT_OF_MEMORY = "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
INFO = (
    'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",{more}}} 1.0\n'
)
SHORT_OF_LENGTH = INFO.format(more='num_gpu_blocks="1800"')


def written(folder: Path, text: str, name: str = "vllm.log") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["memory", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# --- a length that is not known


def test_a_running_server_whose_length_is_guessed_is_ok_and_the_guess_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SHORT_OF_LENGTH, "m.txt")
    code, shown, _ = run(capsys, "--model", MODEL, "--gpu", "a10g", "--from-metrics", path)
    assert code == 0
    text = " ".join(shown.split())
    assert f"{path}: max_model_len is not in these metrics: 131,072 is taken; give --max-model-len" in text
    assert "0.22 requests of 131,072 tokens (taken: the server's max_model_len is not known) fit at once" in text
    assert "for 131,072 tokens per request, which is taken" in text
    assert "would not start" not in text, "the guess explains it"
    made = wt.memory_plan(MODEL, "a10g", from_metrics=path)
    assert (made.verdict, made.to_dict()["origins"]["max_model_len"]) == ("ok", "taken")


def test_a_length_that_is_given_is_no_guess(tmp_path: Path) -> None:
    made = wt.memory_plan(MODEL, "a10g", from_metrics=written(tmp_path, SHORT_OF_LENGTH, "m.txt"), max_model_len=8192)
    assert not any("max_model_len is not in" in note for note in made.notes)
    assert "max_model_len" not in made.to_dict()["origins"]
    assert "which is taken" not in made.text()
    assert made.max_concurrency == pytest.approx(1800 / 512)


# --- figures that cannot be, or disagree


def test_a_cache_in_memory_that_was_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, ENGINE + AVAILABLE.format(gib="-57.50") + TOKENS.format(tokens=471_040))
    kept = tmp_path / "ours.json"
    code, shown, error = run(capsys, "--gpu", "h100", "--from-log", log, "--save-correction", kept)
    assert (code, shown) == (2, "")
    assert "vllm.log, line 2: -57.50 GiB are available" in error
    assert "line 3 tells 471,040 tokens" in error
    assert not kept.exists()


def test_a_start_up_that_failed_for_want_of_memory_is_read(tmp_path: Path) -> None:
    failed = ENGINE + AVAILABLE.format(gib="-3.50") + "ERROR ValueError: No available memory for the cache blocks.\n"
    assert wt.memory_plan(gpu="l4", from_log=written(tmp_path, failed)).verdict == "does_not_start"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ENGINE + AVAILABLE.format(gib="57.50") + TOKENS.format(tokens=47_104), "are 5.75 GiB, not the 57.50 GiB"),
        (
            ENGINE + TOKENS.format(tokens=442_368) + "INFO [x.py:1] # GPU blocks: 2944\n",
            "442,368 tokens are not 2,944 blocks of 16",
        ),
    ],
)
def test_nothing_is_learnt_from_a_pool_whose_figures_disagree(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = written(tmp_path, text), tmp_path / "ours.json"
    code, _, error = run(capsys, "--gpu", "h100", "--from-log", log, "--save-correction", kept)
    assert code == 2
    assert words in error
    assert not kept.exists()
    made = wt.memory_plan(gpu="h100", from_log=log)
    assert any(words in warning for warning in made.warnings)
    changed = wt.memory_plan(gpu="h100", from_log=log, max_model_len=4096)
    assert changed.judged.plan.request.correction_bytes == 0
    assert any("as its figures disagree" in note for note in changed.notes)


def test_metrics_of_a_dense_model_with_more_tokens_than_blocks_contradict_themselves(tmp_path: Path) -> None:
    text = INFO.format(more='kv_cache_size_tokens="450672",num_gpu_blocks="2816"')
    made = wt.memory_plan(MODEL, "h100", from_metrics=written(tmp_path, text, "m.txt"))
    [warning] = [text for text in made.warnings if "blocks of 16" in text]
    assert "m.txt, line 1: 450,672 tokens are not 2,816 blocks of 16" in warning
    assert not any("share" in note for note in made.notes)
    with pytest.raises(ValueError, match="nothing is learnt"):
        made.profile()


@pytest.mark.parametrize(
    ("model", "tokens", "length"),
    [(MODEL, 45_056, None), (MODEL, 45_050, None), (MODEL, 45_051, 12_287), ("gpt-oss-20b", 80_000, None)],
    ids=["blocks x 16", "no whole blocks", "a length within a block", "layers of several kinds"],
)
def test_tokens_that_some_length_or_layers_of_several_kinds_explain_are_no_contradiction(
    model: str, tokens: int, length: int | None, tmp_path: Path
) -> None:
    text = INFO.format(more=f'kv_cache_size_tokens="{tokens}",num_gpu_blocks="2816"')
    made = wt.memory_plan(model, "h100", from_metrics=written(tmp_path, text, "m.txt"), max_model_len=length)
    assert made.disagreements == ()


def test_more_free_memory_than_there_is_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "(EngineCore pid=9) INFO [gpu_worker.py:391] Free memory on device (90.00/79.19 GiB) on startup. Desired\n"
    code, _, error = run(capsys, "--gpu", "h100", "--from-log", written(tmp_path, WHOLE + line))
    assert code == 2
    assert "vllm.log, line 4: 90.00 GiB of memory are free" in error
    assert "in all (79.19 GiB, line 4)" in error


@pytest.mark.parametrize("card", [["--gpu", "l4"], ["--gpu", "h100", "--gpu-memory-gib", "40"]])
def test_more_free_memory_than_the_named_card_has_names_its_line(
    card: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path, ENGINE + "INFO [worker.py:1] Initial free memory: 70.00 GiB; Requested memory: 0.9\n")
    code, _, error = run(capsys, *card, "--from-log", log)
    assert code == 2
    assert "vllm.log, line 2: 70.00 GiB of the card's memory are free" in error


def test_memory_that_ran_out_after_the_start_is_unsafe_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, _ = run(capsys, "--gpu", "h100", "--from-log", written(tmp_path, WHOLE + SERVES + OUT_OF_MEMORY))
    assert code == 0
    assert ": unsafe" in shown.splitlines()[0]


# --- corrections


@pytest.fixture
def learnt(tmp_path: Path) -> dict[str, Any]:
    return wt.memory_plan(gpu="h100", from_log=written(tmp_path, WHOLE)).profile()


_DEPLOYMENT = (
    "model",
    "gpu",
    "gpu_memory_bytes",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "v0",
    "engine",
    "schema_version",
    "max_num_seqs",
)


def test_a_correction_is_that_of_a_deployment(learnt: dict[str, Any]) -> None:
    assert wt.memory_plan(MODEL, "h100", engine="vllm-0.19.0", correction=learnt).judged.plan.request.correction_bytes


@pytest.mark.parametrize("key", _DEPLOYMENT)
def test_a_correction_without_a_key_of_its_deployment_is_unreadable(
    key: str, learnt: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, words in (
        ({name: value for name, value in learnt.items() if name != key}, f"lacks '{key}'"),
        (learnt | {key: None}, f"'{key}' is None, and must be"),
    ):
        kept = written(tmp_path, json.dumps(content), "ours.json")
        code, shown, error = run(capsys, "--model", MODEL, "--gpu", "h100", "--correction", kept)
        assert (code, shown) == (3, "")
        assert words in error
        assert "--save-correction" in error, "the remedy"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu_memory_bytes", "x"),
        ("gpu_memory_bytes", []),
        ("gpu_memory_bytes", float("inf")),
        ("gpu_memory_bytes", 0),
        ("engine", 5),
        ("engine", "vllm-77"),
        ("schema_version", True),
        ("schema_version", 2),
        ("correction_bytes", 1.5),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", True),
        ("enable_expert_parallel", 1),
        ("v0", "no"),
        ("model", ""),
        ("gpu", ["h100"]),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", 1.2),
        ("enforce_eager", "false"),
        ("kv_cache_dtype", "fp9"),
        ("max_num_batched_tokens", 2048.0),
    ],
)
def test_a_value_that_no_correction_has_is_named(key: str, value: Any, learnt: dict[str, Any]) -> None:
    with pytest.raises(MemoryInputUnreadable, match=key):
        wt.memory_plan(MODEL, "h100", correction=learnt | {key: value})


def test_a_correction_without_its_deployment_is_taken_for_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = written(tmp_path, '{"correction_bytes": -1000000000}', "ours.json")
    code, _, error = run(capsys, "--model", MODEL, "--gpu", "h100", "--correction", kept)
    assert code == 3
    assert f"{kept}: lacks 'schema_version'" in error


def test_a_correction_larger_than_the_card_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = "INFO [utils.py:233] non-default args: {'max_num_batched_tokens': 4000000}\n"
    log, kept = written(tmp_path, budget + WHOLE), tmp_path / "ours.json"
    code, _, error = run(capsys, "--gpu", "h100", "--from-log", log, "--save-correction", kept)
    assert code == 2
    assert "must lie within" in error
    assert not kept.exists()


# --- metrics that never end


def test_a_server_that_sends_a_little_again_and_again_is_left_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_inputs, "TIMEOUT_S", 0.3)
    done = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while not done.wait(0.05):
                try:
                    connection.sendall(b"# a line\n")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=drip, args=(listener,))
        server.start()
        begun = time.monotonic()
        try:
            with pytest.raises(MemoryInputUnreadable, match=r"no whole answer within 0\.3 s"):
                memory_inputs.read_metrics_settings(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
            assert time.monotonic() - begun < 5
        finally:
            done.set()
            server.join()


def test_an_answer_that_is_cut_off_is_told(tmp_path: Path) -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n" + SHORT_OF_LENGTH.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        with pytest.raises(MemoryInputUnreadable, match="bytes early"):
            memory_inputs.read_metrics_settings(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        server.join()


# --- flags


def test_requests_longer_than_max_model_len_are_a_warning() -> None:
    made = wt.memory_plan(MODEL, "h100", mean_tokens=200_000)
    assert any("--mean-tokens 200,000 is more than max_model_len (131,072)" in text for text in made.warnings)
    assert not wt.memory_plan(MODEL, "h100", mean_tokens=131_072).warnings
    swept = wt.memory_sweep(MODEL, "h100", mean_tokens=10_000, max_model_len=[8192, 16_384])
    assert any(text.startswith("row 1: --mean-tokens 10,000 is more than") for text in swept.warnings)


def test_a_fraction_of_bytes_names_the_size_that_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "--model", MODEL, "--gpu", "h100", "--kv-cache-memory-bytes", "1.5")
    assert code == 2
    assert "'1.5' must be whole" in error
    assert "write 1.5GiB" in error


def test_a_cache_that_was_given_is_not_equivalent_to_a_share() -> None:
    for given in ({"kv_cache_memory_bytes": "20GiB"}, {"num_gpu_blocks_override": 10_000}):
        made = wt.memory_plan(MODEL, "h100", **given)
        assert "equivalent to" not in made.text()
        assert made.to_dict()["equivalent_gpu_memory_utilization"] is None
    assert "equivalent to" in wt.memory_plan(MODEL, "h100").text()


@pytest.mark.parametrize("flag", ["--html", "--save-correction"])
@pytest.mark.parametrize(
    ("name", "words"), [("", "a folder; name a file (an empty name"), ("-", "standard output is not written to")]
)
def test_an_output_that_is_no_file_is_told(
    flag: str,
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown, error = run(capsys, "--model", MODEL, "--gpu", "h100", flag, name)
    assert (code, shown) == (2, "")
    assert words in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm-0.19.77", "0.19 has no patch release 0.19.77 (0.19.0, "),
        ("newest", "'newest' is no number of a release"),
    ],
)
def test_the_wrong_part_of_a_release_is_named(engine: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "--model", MODEL, "--gpu", "h100", "--engine", engine)
    assert code == 2
    assert words in error


# --- sweeps and values from Python


def test_the_fitted_length_of_a_sweep_is_shown(tmp_path: Path) -> None:
    alone = wt.memory_plan(MODEL, "l4", max_model_len="auto").settings["max_model_len"]
    swept = wt.memory_sweep(MODEL, "l4", max_model_len="8k,auto")
    assert [point["planned_max_model_len"] for point in swept.to_dict()["points"]] == [8000, alone]
    assert f"auto = {alone:,}" in swept.text()
    swept.report(tmp_path / "sweep.html")
    assert f"auto = {alone:,}" in (tmp_path / "sweep.html").read_text("utf-8")


def test_numbers_as_text_are_numbers_in_the_table_of_a_sweep() -> None:
    table = wt.memory_sweep(MODEL, "h100", max_model_len=["8k", 16_384]).table
    assert table["max_model_len"].tolist() == [8000, 16_384]


@pytest.mark.parametrize(
    "sizes",
    [
        (size for size in (1, 2, 4)),
        {4, 1, 2},
        np.array([1, 2, 4]),
        (1, "2,4"),
        "1,2,4",
        range(1, 5),
    ],
    ids=["generator", "set", "array", "text within", "text", "range"],
)
def test_a_sweep_takes_any_iterable(sizes: Any) -> None:
    swept = wt.memory_sweep(MODEL, "h100", tensor_parallel_size=sizes)
    values = [point.values["tensor_parallel_size"] for point in swept.points]
    assert values == ([1, 2, 3, 4] if isinstance(sizes, range) else [1, 2, 4])
    assert all(type(value) is int for value in values)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ([], ValueError, "tensor_parallel_size: there is no value in it"),
        (np.array([[1, 2]]), TypeError, "tensor_parallel_size must be one value, got ndarray"),
        ({"a": 1}, TypeError, "must be a number or a text, got dict"),
        (itertools.count(1), ValueError, "more than 2,000"),
    ],
    ids=["none", "table", "dict", "endless"],
)
def test_a_sweep_refuses_what_holds_no_values(sizes: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wt.memory_sweep(MODEL, "h100", tensor_parallel_size=sizes)


def test_numbers_of_numpy_are_numbers() -> None:
    given = wt.memory_plan(
        MODEL,
        "h100",
        tensor_parallel_size=np.int64(2),
        gpu_memory_utilization=np.float64(0.9),
        enforce_eager=np.bool_(True),
        mean_tokens=cast("int", np.int32(3000)),
    )
    plain = wt.memory_plan(
        MODEL, "h100", tensor_parallel_size=2, gpu_memory_utilization=0.9, enforce_eager=True, mean_tokens=3000
    )
    assert given.to_dict() == plain.to_dict()


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "words"),
    [
        (5, "h100", {}, "model must be a bundled name, the path of a config.json, .*, got int"),
        (MODEL, 5, {}, "gpu must be a name such as 'h100' or a GpuSpec .*, got int"),
        (MODEL, "h100", {"tensor_parallel_size": [1, 2]}, "must be one value, got list; memory_sweep takes several"),
    ],
)
def test_a_value_of_a_type_that_a_setting_cannot_have_is_named(
    model: Any, gpu: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        wt.memory_plan(model, gpu, **settings)


def test_a_config_as_a_dict_is_a_model() -> None:
    config, _ = read_model_config(MODEL)
    named, bundled = wt.memory_plan(config | {"_name_or_path": "ours/llama"}, "h100"), wt.memory_plan(MODEL, "h100")
    assert named.kv_cache_tokens == bundled.kv_cache_tokens
    assert "vllm serve ours/llama" in named.text()
    assert "vllm serve MODEL" in wt.memory_plan(config, "h100").text()
    with pytest.raises(ValueError, match=r"the config: .*not modelled"):
        wt.memory_plan({}, "h100")
    swept = wt.memory_sweep([config, MODEL], "h100")
    assert [point.values["model"] for point in swept.points] == ["MODEL", MODEL]


def test_a_path_object_is_a_model(tmp_path: Path) -> None:
    config, _ = read_model_config(MODEL)
    path = written(tmp_path, json.dumps(config), "config.json")
    assert wt.memory_plan(path, "h100").kv_cache_tokens == wt.memory_plan(MODEL, "h100").kv_cache_tokens


# --- simulations


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [("./nope.json", 3, r"\./nope\.json: no such file"), ("nope", 2, "unknown model 'nope'"), (".", 3, "no config")],
)
def test_a_model_file_that_is_missing_ends_a_simulation_as_it_ends_a_plan(
    model: str,
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = ["--num-prompts", "3", "--input-len", "10", "--output-len", "3"]
    assert main(["simulate", "--model", model, "--gpu", "h100", *workload]) == code
    assert re.search(words, capsys.readouterr().err)
    assert run(capsys, "--model", model, "--gpu", "h100")[0] == code
