"""A tokenizer in many threads and processes, and one that reads for ever."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts

from penstock.errors import ConfigError, DataError
from penstock.text import fast
from penstock.text.fast import LOOK, STATM, resident_bytes
from penstock.text.tokenizer import FileTokenizer, open_tokenizer

BACKENDS = ["reference", "fast"]
TEXTS = list(stdlib_texts())


def answer(tokenizer: FileTokenizer, answers: Any) -> None:
    ids, offsets = tokenizer.encode(TEXTS)
    spans = tokenizer.encode_spans(TEXTS[:1])[2]
    answers.put((tokenizer.backend, ids.tolist(), offsets.tolist(), spans.tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_process_gives_the_same_ids(backend: Any, method: str) -> None:
    tokenizer = open_tokenizer(gpt2_like(), backend=backend)
    ids, offsets = tokenizer.encode(TEXTS)  # in use before the fork
    spans = tokenizer.encode_spans(TEXTS[:1])[2]
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=answer, args=(tokenizer, answers))
    child.start()
    found = answers.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert found == (tokenizer.backend, ids.tolist(), offsets.tolist(), spans.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_other_threads_encode_does_not_hang(backend: Any) -> None:
    tokenizer = open_tokenizer(gpt2_like(), backend=backend)
    wanted = tokenizer.encode(TEXTS)[0]
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            tokenizer.encode(TEXTS[:3])

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                same = np.array_equal(tokenizer.encode(TEXTS)[0], wanted)
                os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_share_a_tokenizer_without_sharing_an_engine(backend: Any) -> None:
    tokenizer = open_tokenizer(gpt2_like(), backend=backend)
    wanted = [tokenizer.encode([text])[0].tolist() for text in TEXTS]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: tokenizer.encode([text])[0].tolist(), TEXTS * 3))
    assert found == wanted * 3


@pytest.mark.parametrize("threads", [2, 3, 50])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_threads_gives_the_same_ids(backend: Any, threads: int) -> None:
    texts = [*TEXTS, "", "x" * 100_000, "", *TEXTS[:2], ""]
    ids, offsets = open_tokenizer(gpt2_like(), backend=backend).encode(texts)
    found, ends = open_tokenizer(gpt2_like(), backend=backend, threads=threads).encode(texts)
    assert np.array_equal(found, ids)
    assert np.array_equal(ends, offsets)
    assert (found.dtype, ends.dtype) == (np.uint32, np.int64)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_threads_are_started_that_were_not_asked_for(backend: Any) -> None:
    code = f"""
import os
from penstock.text.tokenizer import open_tokenizer
before = len(os.listdir("/proc/self/task"))
tokenizer = open_tokenizer({str(gpt2_like())!r}, backend={backend!r})
tokenizer.encode(["some text " * 1000] * 100)
tokenizer.encode_spans(["some text " * 1000] * 100)
print(before, len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before == after


def test_a_pickled_tokenizer_is_its_path_and_its_options() -> None:
    tokenizer = open_tokenizer(gpt2_like(), threads=2, memory_limit=1 << 30)
    blob = pickle.dumps(tokenizer)
    assert len(blob) < 1000
    again = pickle.loads(blob)
    assert (again._threads, again._memory_limit) == (2, 1 << 30)
    assert (again.backend, again.content_hash) == (tokenizer.backend, tokenizer.content_hash)
    assert (again.name, again.eos_id) == (tokenizer.name, tokenizer.eos_id)


def test_a_relative_path_opens_in_a_process_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gpt2_like())
    blob = pickle.dumps(open_tokenizer("tokenizer.json", backend="reference"))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(blob).eos_id == 3000


def test_files_that_changed_since_are_noticed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpt2_like(), tmp_path / "copy"))
    blob = pickle.dumps(open_tokenizer(folder, backend="reference"))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|endofbook|>"))
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has changed since it was opened"):
        pickle.loads(blob)


def test_a_whole_tokenizer_is_what_was_read_whatever_becomes_of_its_files(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gpt2_like(), tmp_path / "copy"))
    tokenizer = open_tokenizer(folder)
    blob = pickle.dumps(tokenizer.whole())
    shutil.rmtree(folder)
    again = pickle.loads(blob).open()
    again.warm_up()
    for found, wanted in zip(again.encode(TEXTS), tokenizer.encode(TEXTS), strict=True):
        assert np.array_equal(found, wanted)
    assert (again.backend, again.content_hash) == (tokenizer.backend, tokenizer.content_hash)
    assert again.on("tokenizers").encode(TEXTS)[0].tolist() == tokenizer.encode(TEXTS)[0].tolist()


# ---------------------------------------------------------------- texts together, and one by one


def test_a_tokenizer_that_is_alone_gives_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "MANY", 3 * len(TEXTS))
    together, alone = open_tokenizer(gpt2_like()), open_tokenizer(gpt2_like(), alone=True)
    short = [text[:200] for text in TEXTS] + ["", "é"]
    for texts in [TEXTS, short, short, short, short, ["x" * 10**6], [""]]:
        for found, wanted in zip(alone.encode(texts), together.encode(texts), strict=True):
            assert np.array_equal(found, wanted)
            assert found.dtype == wanted.dtype


def test_texts_together_that_differ_from_each_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(gpt2_like(), alone=True)
    monkeypatch.setattr(fast, "MANY", 0)
    monkeypatch.setattr(fast.Fast, "_together", lambda self, begins, data: (begins, begins))
    with pytest.raises(ConfigError, match="together than for each"):
        tokenizer.encode(["short", "texts"])


def test_long_texts_of_a_tokenizer_that_is_alone_need_no_awkward() -> None:
    code = f"""
import sys
from penstock.text.tokenizer import open_tokenizer
open_tokenizer({str(gpt2_like())!r}, alone=True).encode(["some text " * 1000] * 10)
print("awkward" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


# --------------------------------------------------------------------------------- reading for ever


def new_words(seed: int, size: int = LOOK) -> str:
    letters = np.random.default_rng(seed).integers(97, 123, (size // 10, 10), dtype=np.uint8)
    letters[:, 0] = 32
    return letters.tobytes().decode()


def test_the_fast_backend_is_opened_anew_past_its_limit_with_the_same_ids() -> None:
    tokenizer = open_tokenizer(gpt2_like(), memory_limit=1 << 20)
    patient = open_tokenizer(gpt2_like(), memory_limit=1 << 40)
    for seed in range(3):
        text = new_words(seed, 10 << 20)
        assert np.array_equal(tokenizer.encode([text])[0], patient.encode([text])[0])
    (engine,) = tokenizer._fasts["text"]._free
    (never,) = patient._fasts["text"]._free
    assert (engine.opened, never.opened) == (4, 1)


@pytest.mark.skipif(not STATM.exists(), reason="reads its size in /proc")
def test_memory_stays_bounded_where_no_word_comes_twice() -> None:
    tokenizer = open_tokenizer(gpt2_like(), memory_limit=64 << 20)
    before, most = resident_bytes(), 0
    for seed in range(12):
        tokenizer.encode([new_words(seed)])
        most = max(most, resident_bytes() - before)
    assert most < 400 << 20  # 12 × 8 MB at 8 bytes each, all kept, would be 770 MB
    assert tokenizer._fasts["text"]._free[0].opened > 1
