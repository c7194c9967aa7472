"""Workers and stores: order, equal bytes whoever works, death, Ctrl-C, and what is kept."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_jobs
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.workers import (
    Done,
    Job,
    JobFailed,
    Progress,
    RayMissing,
    RayUnreachable,
    Store,
    StoreError,
    StoreInUse,
    WorkerDied,
    Workers,
    canonical_json,
    content_version,
    usable_cpus,
)

HERE = Path(__file__).parent
PINNED = "0" * 64
PIN = """
from windtunnel.workers import jobs, store
jobs.content_version = store.content_version = lambda: "0" * 64
"""


def job(function: str, argument: Any) -> Job:
    return Job(f"worker_jobs:{function}", argument)


def squares(count: int) -> list[Job]:
    return [job("square", number) for number in range(count)]


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    """Two processes that all tests share: starting them takes longer than what they do."""
    with Workers(2) as workers:
        yield workers


@pytest.fixture
def alone() -> Iterator[Workers]:
    with Workers(1) as workers:
        yield workers


@pytest.fixture(autouse=True)
def _one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody edited the package while its tests run."""
    for module in ("jobs", "store"):
        monkeypatch.setattr(f"windtunnel.workers.{module}.content_version", lambda: PINNED)


# --- jobs and keys


def test_equal_data_has_one_key_however_it_is_written() -> None:
    one = job("square", {"b": (1, 2), "a": Path("x")}).key
    assert one == job("square", {"a": "x", "b": [1, 2]}).key
    assert one != job("square", {"a": "x", "b": [2, 1]}).key
    assert one != job("slow_square", {"a": "x", "b": [1, 2]}).key


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_canonical_json_is_ascii_and_reads_back(value: Any) -> None:
    text = canonical_json(value)
    assert text.isascii()
    assert canonical_json(json.loads(text)) == text


def test_what_is_no_plain_data_has_no_key() -> None:
    with pytest.raises(TypeError, match="no plain data"):
        _ = job("square", {1, 2}).key
    with pytest.raises(TypeError, match="NaN"):
        _ = job("square", float("nan")).key


def test_the_version_of_the_content_changes_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "profile.json"
    monkeypatch.setattr("windtunnel.workers.jobs._PACKAGE", tmp_path)
    found = []
    for text in ("{}", "[]", "{}"):
        data.write_text(text, "utf-8")
        content_version.cache_clear()
        found.append(content_version())
    content_version.cache_clear()
    assert found[0] == found[2] != found[1]


# --- order


@pytest.mark.parametrize("num", [1, 2])
def test_results_come_in_the_order_of_the_jobs_whoever_is_ready_first(num: int) -> None:
    jobs = [job("slow_square", [number, 0.03 if number % 3 == 0 else 0.0]) for number in range(9)]
    told: list[Done] = []
    with Workers(num) as workers:
        found = list(workers.map(jobs, tell=told.append))
    assert found == [{"squared": number * number} for number in range(9)]
    assert sorted(done.index for done in told) == list(range(9))
    assert all(done.result == found[done.index] and not done.was_cached for done in told)
    assert all(done.job is jobs[done.index] and done.elapsed_s >= 0 for done in told)


def test_both_processes_work(two: Workers) -> None:
    assert len(set(two.map([job("process", number) for number in range(6)]))) == 2


def test_processes_stay_from_round_to_round(two: Workers) -> None:
    first = set(two.map([job("process", number) for number in range(6)]))
    assert set(two.map([job("process", number) for number in range(6, 12)])) == first


def test_one_worker_is_this_process(alone: Workers) -> None:
    assert list(alone.map([job("process", 0), job("process", 1)])) == [os.getpid()] * 2


def test_equal_jobs_are_done_once(tmp_path: Path, two: Workers, alone: Workers) -> None:
    for name, workers in (("one", alone), ("two", two)):
        log = tmp_path / name
        told: list[Done] = []
        jobs = [job("note_and_square", [str(log), number]) for number in (3, 4, 3, 3, 5, 4)]
        assert list(workers.map(jobs, tell=told.append)) == [9, 16, 9, 9, 25, 16]
        assert sorted(log.read_text("utf-8").split()) == ["3", "4", "5"]
        assert [done.index for done in sorted(told, key=lambda done: done.index) if done.was_cached] == [2, 3, 5]


def test_no_job_is_done_before_its_result_is_asked_for(tmp_path: Path, alone: Workers) -> None:
    log = tmp_path / "log"
    results = alone.map([job("note_and_square", [str(log), number]) for number in range(5)])
    assert not log.exists()
    assert [next(results), next(results)] == [0, 1]
    assert log.read_text("utf-8").split() == ["0", "1"]


def test_an_iterator_that_is_left_in_the_middle_leaves_the_workers_usable(two: Workers, alone: Workers) -> None:
    for workers in (two, alone):
        results = workers.map([job("slow_square", [number, 0.05]) for number in range(50)])
        assert next(results) == {"squared": 0}
        results.close()  # type: ignore[attr-defined]
        assert list(workers.map(squares(4))) == [{"squared": number * number} for number in range(4)]


def test_a_slow_job_lets_only_so_many_others_pass(
    tmp_path: Path, two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose results would pile up."""
    monkeypatch.setattr("windtunnel.workers.workers.WINDOW", 5)
    log = tmp_path / "log"
    passed: list[int] = []
    slow = job("slow_square", [2, 0.3])
    jobs = [slow, *(job("note_and_square", [str(log), number]) for number in range(20))]
    results = two.map(jobs, tell=lambda done: passed.append(done.index))
    assert next(results) == {"squared": 4}
    assert {0} <= set(passed) <= set(range(5))
    assert list(results) == [number**2 for number in range(20)]


def test_who_is_told_may_fail_and_the_workers_stay_usable(tmp_path: Path, two: Workers, alone: Workers) -> None:
    def tell(done: Done) -> None:
        raise OSError("nobody listens")

    for name, workers in (("one", alone), ("two", two)):
        with Store(tmp_path / name) as store:
            with pytest.raises(OSError, match="nobody listens"):
                list(workers.map(squares(9), store=store, tell=tell))
            assert squares(1)[0].key in store
            assert list(workers.map(squares(9), store=store)) == [{"squared": number**2} for number in range(9)]


def test_two_rounds_may_be_interleaved(two: Workers, alone: Workers) -> None:
    for workers in (two, alone):
        pairs = zip(workers.map(squares(20)), workers.map(squares(20)[::-1]), strict=True)
        assert [(one["squared"], other["squared"]) for one, other in pairs] == [
            (number**2, (19 - number) ** 2) for number in range(20)
        ]


def test_large_arguments_and_results_pass(two: Workers) -> None:
    sizes = [3_000_000, 1, 5_000_000, 2]
    assert [len(text) for text in two.map([job("chatty", size) for size in sizes])] == sizes
    texts = ["y" * size for size in sizes]
    assert list(two.call("worker_jobs:fail_for", [[text] for text in texts])) == texts


def test_no_jobs_have_no_results(two: Workers) -> None:
    assert list(two.map([])) == []


def test_calls_carry_any_object(two: Workers, alone: Workers) -> None:
    for workers in (two, alone):
        assert list(workers.call("operator:neg", [1 + 2j, 3j])) == [-1 - 2j, -3j]


# --- errors


@pytest.mark.parametrize("num", [1, 2])
def test_the_error_is_that_of_the_first_job_in_order(num: int) -> None:
    """Although the third fails at once, and the second only later."""
    jobs = [
        job("square", 1),
        job("slow_fail", [0.2, "late"]),
        job("slow_fail", [0.0, "early"]),
        *(job("square", number) for number in range(20)),
    ]
    with Workers(num) as workers:
        results = workers.map(jobs)
        assert next(results) == {"squared": 1}
        with pytest.raises(ValueError, match="late"):
            next(results)


def test_an_exception_keeps_its_class_and_says_where_it_was_raised(two: Workers) -> None:
    with pytest.raises(ValueError, match="7 is refused") as caught:
        list(two.map([job("fail_for", [number, 7]) for number in range(9)]))
    assert "in fail_for" in str(caught.value.__cause__)


def test_our_exceptions_come_back_as_they_are(two: Workers) -> None:
    from windtunnel.sim.deployment.memory import InfeasibleDeployment

    with pytest.raises(InfeasibleDeployment, match="too large") as caught:
        list(two.map([job("infeasible", 0), job("infeasible", 1)]))
    assert caught.value.largest_max_model_len == 4096


def test_an_exception_that_cannot_be_carried_is_told(two: Workers) -> None:
    with pytest.raises(JobFailed, match="Awkward: this and that"):
        list(two.map([job("awkward", 0), job("awkward", 1)]))


@pytest.mark.parametrize("num", [1, 2])
def test_a_result_that_is_no_plain_data_is_refused(num: int) -> None:
    with Workers(num) as workers, pytest.raises(JobFailed, match="not_a_number returned what is no plain data"):
        list(workers.map([job("not_a_number", 0), job("not_a_number", 1)]))


def test_a_function_that_is_not_there_is_an_error_not_a_hang(two: Workers) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        list(two.map([job("nothing", 0), job("nothing", 1)]))
    with pytest.raises(ValueError, match=r"package\.module:name"):
        list(two.map([Job("nothing", 0), Job("nothing", 1)]))


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        Workers(0)


# --- processes


def test_a_job_whose_process_dies_is_done_again(tmp_path: Path, two: Workers) -> None:
    jobs = [job("die_once", [str(tmp_path / "mark")]), *squares(30)]
    first, *others = two.map(jobs)
    assert first == "done the second time"
    assert others == [{"squared": number * number} for number in range(30)]


def test_a_job_that_kills_every_process_is_named(tmp_path: Path, two: Workers) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(WorkerDied, match=r"3 processes died .*SIGKILL.* of worker_jobs:die with 17; .*--jobs 1"):
            list(two.map([*squares(5), job("die", 17), *squares(9)[5:]], store=store))
        assert all(each.key in store for each in squares(5))


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python itself stops at once."""
    monkeypatch.setattr("windtunnel.workers.processes.serve", os._exit)
    with Workers(2) as workers, pytest.raises(WorkerDied, match="3 processes ended while they started"):
        list(workers.map(squares(4)))


def serve_with(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("windtunnel.workers.processes.serve", getattr(worker_jobs, name))


def test_a_process_that_hangs_while_it_starts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with an argument that no pipe takes until somebody reads it."""
    serve_with(monkeypatch, "serve_never")
    monkeypatch.setattr("windtunnel.workers.processes.START_S", 0.5)
    with Workers(2) as workers, pytest.raises(WorkerDied, match=r"ended while they started \(not ready after 0\.5 s\)"):
        list(workers.call("operator:neg", ["x" * 5_000_000] * 3))


def test_a_dead_process_whose_pipe_is_held_by_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, "serve_and_die_holding_on")
    monkeypatch.setattr("windtunnel.workers.processes._LOOK_S", 0.1)
    with Workers(2) as workers, pytest.raises(WorkerDied, match=r"3 processes died .*exit code 7"):
        list(workers.map(squares(4)))


def test_an_answer_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(monkeypatch, "serve_nonsense")
    with Workers(2) as workers, pytest.raises(JobFailed, match="cannot be read here: ModuleNotFoundError"):
        list(workers.map(squares(4)))


@pytest.mark.parametrize("num", [1, 2])
def test_a_job_that_wants_to_leave_does_not_end_who_asked(num: int) -> None:
    with Workers(num) as workers, pytest.raises(JobFailed, match="worker_jobs:leave raised SystemExit: 3"):
        list(workers.map([job("leave", 0), job("leave", 1)]))


def test_processes_that_died_of_idleness_are_not_held_against_a_job() -> None:
    with Workers(3) as workers:
        pids = set(workers.map([job("process", number) for number in range(9)]))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert list(workers.map(squares(1))) == [{"squared": 0}]


def test_results_awaited_from_closed_workers_are_an_error_not_a_hang() -> None:
    with Workers(2) as workers:
        results = workers.map(squares(20))
        assert next(results) == {"squared": 0}
    with pytest.raises(WorkerDied, match="were closed"):
        list(results)


def test_where_no_process_can_be_started_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*arguments: Any) -> None:
        raise OSError("too many processes")

    monkeypatch.setattr("multiprocessing.popen_spawn_posix.Popen._launch", no_process)
    with Workers(2) as workers, pytest.raises(WorkerDied, match=r"no process can be started \(too many.*--jobs 1"):
        list(workers.map(squares(4)))


def test_a_process_whose_code_cannot_be_imported_is_told(tmp_path: Path) -> None:
    """As while a package is edited or installed: the parent has it, a new process has not."""
    script = (
        "import sys\n"
        "from windtunnel.workers import Job, WorkerDied, Workers\n"
        "import windtunnel.workers.processes\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "try:\n"
        "    with Workers(2) as workers:\n"
        "        print(list(workers.map([Job('worker_jobs:square', n) for n in range(4)])))\n"
        "except WorkerDied as error:\n"
        "    print(error)\n"
    )
    (tmp_path / "windtunnel").mkdir()
    (tmp_path / "windtunnel" / "__init__.py").write_text("this is half of a line (", "utf-8")
    command = [sys.executable, "-c", script, str(tmp_path), "x" * 100_000]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert found.stdout == "3 processes ended while they started (exit code 1): do without (--jobs 1)\n"
    assert "SyntaxError" in found.stderr


def test_what_is_printed_where_the_standard_streams_are_closed_does_no_harm(tmp_path: Path) -> None:
    """A pipe would take their place, and what is printed would be read as an answer."""
    script = (
        "import os, sys\n"
        "for number in (0, 1, 2):\n"
        "    os.close(number)\n"
        "from windtunnel.workers import Job, Workers\n"
        "with Workers(2) as workers:\n"
        "    found = list(workers.map([Job('worker_jobs:say', n) for n in range(6)]))\n"
        "open(sys.argv[1], 'w').write(repr(found))\n"
    )
    told = tmp_path / "told"
    command = [sys.executable, "-c", script, str(told)]
    found = subprocess.run(command, env=environment(), timeout=60, check=False)
    assert told.read_text("utf-8") == "[0, 1, 2, 3, 4, 5]"
    assert found.returncode == 0


def test_workers_have_one_thread_each_and_do_not_run_the_main_module(two: Workers) -> None:
    assert set(two.map([job("threads", 0), job("threads", 1)])) <= {os.environ.get("OMP_NUM_THREADS", "1")}
    assert list(two.map([job("loaded", 0), job("loaded", 1)])) == [[], []]


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from windtunnel.workers import Job, Workers\n"
        "with Workers(2) as workers:\n"
        "    print(list(workers.map([Job('worker_jobs:square', n) for n in range(4)])))\n",
        "utf-8",
    )
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert (found.stdout, found.stderr) == (f"{[{'squared': n * n} for n in range(4)]}\n", "")


def test_as_many_workers_as_usable_cpus() -> None:
    assert usable_cpus() >= 1
    with Workers() as workers:
        assert workers.num == usable_cpus()


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr("windtunnel.workers.machine._CPU_LIMIT", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for text, num in (("150000 100000\n", 2), ("max 100000\n", 8), ("50000 100000", 1), ("nonsense", 8)):
        limit.write_text(text, "ascii")
        assert usable_cpus() == num


# --- the store


def test_what_is_kept_is_not_done_again(tmp_path: Path, alone: Workers) -> None:
    log = tmp_path / "log"
    jobs = [job("note_and_square", [str(log), number]) for number in range(6)]
    with Store(tmp_path / "store") as store:
        first = list(alone.map(jobs[:4], store=store))
    told: list[Done] = []
    with Store(tmp_path / "store") as store:
        assert len(store) == 4
        again = list(alone.map(jobs, store=store, tell=told.append))
    assert again[:4] == first
    assert log.read_text("utf-8").split() == [str(number) for number in range(6)]
    assert [done.was_cached for done in told] == [True] * 4 + [False] * 2


def test_a_half_written_line_is_cut_off(tmp_path: Path, alone: Workers) -> None:
    jobs = squares(6)
    with Store(tmp_path) as store:
        whole = list(alone.map(jobs, store=store))
    file = tmp_path / "results.jsonl"
    kept = file.read_bytes()
    for cut in range(0, len(kept), 5):
        file.write_bytes(kept[:cut])
        with Store(tmp_path) as store:
            assert len(store) == max(kept[:cut].count(b"\n") - 1, 0)
            assert store.num_damaged == 0
            if cut % 97 == 5:
                assert list(alone.map(jobs, store=store)) == whole
        if cut % 97 == 5:
            assert file.read_bytes() == kept


def test_a_damaged_line_is_counted_and_done_again(tmp_path: Path, alone: Workers) -> None:
    with Store(tmp_path) as store:
        whole = list(alone.map(squares(5), store=store))
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes().replace(b'{"squared":9}', b'{"squared":8}'))
    with Store(tmp_path) as store:
        assert (len(store), store.num_damaged) == (4, 1)
        assert list(alone.map(squares(5), store=store)) == whole


def test_results_of_another_version_are_not_used(
    tmp_path: Path, alone: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        list(alone.map(squares(3), store=store))
    for module in ("jobs", "store"):
        monkeypatch.setattr(f"windtunnel.workers.{module}.content_version", lambda: "f" * 64)
    told: list[Done] = []
    with Store(tmp_path) as store:
        assert (len(store), store.num_outdated) == (0, 3)
        list(alone.map(squares(3), store=store, tell=told.append))
    assert not any(done.was_cached for done in told)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with Store(tmp_path):
        code = f"from windtunnel.workers import Store; Store({str(tmp_path)!r})"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert f"StoreInUse: another windtunnel (process {os.getpid()}) is writing to {tmp_path}" in found.stderr
        with pytest.raises(StoreInUse):
            Store(tmp_path)
    Store(tmp_path).close()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        Store(tmp_path / "store")


@pytest.mark.skipif(sys.platform != "linux", reason="where nobody may make a folder")
def test_a_file_system_that_takes_nothing_is_told() -> None:
    with pytest.raises(StoreError, match="cannot keep results in /proc/store"):
        Store("/proc/store")


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot keep results in .*file"):
        Store(tmp_path / "file")


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("my own\n", "utf-8")
    with pytest.raises(StoreError, match="holds no results of this version"):
        Store(tmp_path)
    assert (tmp_path / "results.jsonl").read_text("utf-8") == "my own\n"


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: a line fits in part and is taken back."""
    code = PIN + (
        "import resource, signal, sys\n"
        "from windtunnel.workers import Job, Store, Workers\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with Store(sys.argv[1]) as store, Workers(1) as workers:\n"
        "    list(workers.map([Job('worker_jobs:square', n) for n in range(50)], store=store))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert "StoreError: cannot keep a result" in found.stderr
    assert "results are safe there, and the same command goes on from them" in found.stderr
    kept = (tmp_path / "results.jsonl").read_bytes()
    assert kept.endswith(b"}\n")
    with Store(tmp_path) as store:
        assert len(store) == kept.count(b"\n") - 1 > 3


@given(st.lists(st.tuples(st.integers(0, 30), st.text(max_size=9)), max_size=20))
def test_a_store_gives_back_what_was_put_first(tmp_path_factory: pytest.TempPathFactory, puts: Any) -> None:
    folder = tmp_path_factory.mktemp("store")
    expected: dict[str, str] = {}
    with Store(folder) as store:
        for number, text in puts:
            key = job("square", number).key
            store.put(key, json.dumps(text))
            expected.setdefault(key, text)
    with Store(folder) as store:
        assert {key: store.get(key) for key in expected} == expected
        assert len(store) == len(expected)


# --- crashes in the middle of a long run

LONG = f"""{PIN}
import sys
from worker_jobs import *
from windtunnel.workers import Job, Store, Workers, canonical_json
folder, num, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
jobs = [Job("worker_jobs:slow_square", [number, pause_s]) for number in range(500)]
with Store(folder) as store, Workers(num) as workers:
    def tell(done):
        if not done.was_cached:
            print(len(store), flush=True)
    results = list(workers.map(jobs, store=store, tell=tell))
print(canonical_json(results))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE)}


def long_run(folder: Path, num: int = 2, pause_s: float = 0.002) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LONG, str(folder), str(num), str(pause_s)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    """The results that it prints last."""
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    return out.splitlines()[-1]


def read_until(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    while int(process.stdout.readline()) < count:
        pass


def children(process: subprocess.Popen[str]) -> list[int]:
    """Its worker processes, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                is_worker = b"spawn_main" in entry.joinpath("cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == process.pid and is_worker:
                found.append(int(entry.name))
    return sorted(found)


EXPECTED = canonical_json([{"squared": number * number} for number in range(500)])
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@on_linux
@pytest.mark.slow
def test_500_jobs_survive_the_death_of_workers(tmp_path: Path) -> None:
    process = long_run(tmp_path, pause_s=0.01)
    for count in (60, 120, 200):
        read_until(process, count)
        os.kill(children(process)[0], signal.SIGKILL)
    assert finished(process) == EXPECTED


@on_linux
@pytest.mark.slow
def test_500_jobs_go_on_after_the_parent_was_killed(tmp_path: Path) -> None:
    process = long_run(tmp_path, pause_s=0.01)
    read_until(process, 150)
    workers = children(process)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=30)  # it ends only when nobody holds its output any more, so when the workers ended
    deadline = time.monotonic() + 10  # on its way out a process gives up its output before it counts as ended
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))
    with Store(tmp_path) as store:
        assert 150 <= len(store) < 500
    again = long_run(tmp_path)
    assert finished(again) == EXPECTED


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_500_jobs_go_on_after_ctrl_c(tmp_path: Path) -> None:
    process = long_run(tmp_path, pause_s=0.01)
    read_until(process, 100)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert err.count("Traceback") == 1  # this script's own; the workers say nothing
    assert "KeyboardInterrupt" in err
    with Store(tmp_path) as store:
        assert 100 <= len(store) < 500
    assert finished(long_run(tmp_path)) == EXPECTED


# --- Ray


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissing, match=r"pip install 'windtunnel\[ray\]'"):
        Workers(ray="auto")


@pytest.mark.parametrize("address", ["", "nonsense", "local:0", "local:x", "http://host:1", "host", "host:"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be auto"):
        Workers(ray=address)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "auto"])
def test_a_cluster_that_does_not_answer_is_told_at_once(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(RayUnreachable, match=f"no Ray cluster answers at '{address}'"):
        Workers(ray=address)


@pytest.mark.slow
def test_ray_has_the_same_results_and_errors_as_local_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    code = (
        "import sys\n"
        "from windtunnel.workers import Job, Workers, canonical_json\n"
        "with Workers(ray='local:2') as workers:\n"
        "    assert workers.num == 2\n"
        "    jobs = [Job('worker_jobs:slow_square', [n, 0.002]) for n in range(500)]\n"
        "    print(canonical_json(list(workers.map(jobs))))\n"
        "    print(*workers.map([Job('worker_jobs:die_once', [sys.argv[1]])]))\n"
        "    for function in ('fail_for', 'die'):\n"
        "        try:\n"
        "            list(workers.map([Job('worker_jobs:' + function, [n, 3]) for n in range(5)]))\n"
        "        except Exception as error:\n"
        "            print(f'{type(error).__name__}: {error}')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mark")]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    results, again, failed, died = found.stdout.splitlines()
    assert results == EXPECTED
    assert again == "done the second time"
    assert failed == "ValueError: 3 is refused"
    assert died.startswith("WorkerDied: 3 Ray workers died one after the other of worker_jobs:die with [0, 3]")


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def done(index: int, *, was_cached: bool = False) -> Done:
    return Done(index, job("square", index), None, was_cached, 0.1)


def test_progress_tells_rate_and_time_left() -> None:
    progress = Progress(500, label="sweep")
    for index in range(120):
        progress(done(index, was_cached=index < 20))
    assert progress.line(50.0) == "sweep: 120 of 500 (20 from before), 2.0/s, 3:10 left"
    assert Progress(500).line(1.0) == "0 of 500"
    counting = Progress()
    counting(done(0))
    assert counting.line(10_000.0) == "1, 10000.0 s each"


def test_progress_overwrites_its_line_and_takes_it_away() -> None:
    stream = Terminal()
    with Progress(3, stream=stream) as progress:
        for index in range(3):
            progress(done(index))
    shown = stream.getvalue().split("\r")
    assert any(part.startswith("3 of 3") for part in shown)
    assert shown[-1] == ""
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_progress_is_silent_without_a_terminal_or_if_quiet(stream: io.StringIO, quiet: bool) -> None:
    with Progress(2, stream=stream, quiet=quiet) as progress:
        progress(done(0))
        progress(done(1))
    assert stream.getvalue() == ""
    assert progress.num_done == 2


def test_workers_and_their_modules_cost_little_to_import() -> None:
    """A worker loads what its jobs need, not more."""
    code = "import sys, windtunnel.workers; print({'numpy', 'multiprocessing', 'ray'} & sys.modules.keys() or '')"
    began_s = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == ""
    assert time.monotonic() - began_s < 30
