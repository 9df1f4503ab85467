"""Raw documents to a committed store: restartable, parallel, the same bytes in the end.

    Pipeline(recipe("pretrain"), ["corpus/"], "tokens", "tokenizer/").run()

What is here is what users ask for. The work itself is `Preparation`'s, which is imported when it is
needed: the import takes half a second, in which worker processes are started and do the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PenstockError
from penstock.prepare.config import PipelineConfig
from penstock.prepare.pool import Pool, said
from penstock.prepare.tally import Progress, Tally
from penstock.text.files import InputFile, find_files

if TYPE_CHECKING:
    from penstock.text.documents import Policy

COMPLETE = Path(".prepare", "tally.json")  # there from the end of a run on
A_WORK = 1 << 20  # bytes of input that make a process worth starting


class Pipeline:
    """Prepares the documents of `input_paths` by a recipe, into the store `output_dir`.

    `policy` "reject" writes bad documents to `rejects.jsonl`, up to a share of `max_rejects`;
    "error" stops at the first. `workers` are processes, by default as many as there are cores for
    this one; 0 does all the work here.
    """

    def __init__(
        self,
        config: PipelineConfig,
        input_paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        *,
        workers: int | None = None,
        policy: Policy = "error",
        max_rejects: float = 0.01,
        backend: str = "auto",
        trust_pickle: bool = False,
        overwrite: bool = False,
    ) -> None:
        if policy not in ("error", "reject"):
            raise ConfigError(f"policy is 'error' or 'reject', not {policy!r}")
        if not 0 <= max_rejects <= 1:
            raise ConfigError(f"max_rejects is a share from 0 to 1, not {max_rejects}")
        if workers is not None and workers < 0:
            raise ConfigError(f"workers is a number of processes, or 0, not {workers}")
        self.config, self.out = config, Path(output_dir).absolute()
        if isinstance(input_paths, str | os.PathLike):
            input_paths = [input_paths]
        self.paths = list(input_paths)
        self.tokenizer_path = os.fspath(tokenizer_path)
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self.max_rejects, self.overwrite = max_rejects, overwrite
        self.policy: Policy = policy
        self.backend, self.trust_pickle = backend, trust_pickle

    def run(self, progress: Callable[[Progress], None] | None = None) -> Tally:
        """Do what is left to do; gives what became of every document and token."""
        try:
            return self._run(progress)
        except OSError as error:  # of the parent's own writing; workers say theirs by themselves
            if isinstance(error, PenstockError):
                raise
            raise said(error) from error

    def _run(self, progress: Callable[[Progress], None] | None) -> Tally:
        self._check_out()
        files = find_files(self.paths)
        with Pool(self._processes(files)) as pool:
            from penstock.prepare.preparation import Preparation  # noqa: PLC0415 - see above

            return Preparation(self, files, progress).run(pool)

    def _processes(self, files: Sequence[InputFile]) -> int:
        """How many workers there will be work for, as far as can be said without a look at it."""
        if (self.out / COMPLETE).exists() and not self.overwrite:
            return 0
        size = sum(file.size for file in files)
        return min(self.workers, max(size // A_WORK, 1))

    def _check_out(self) -> None:
        """Refuse an output among the documents, which the next run would take for some."""
        out = self.out.resolve()
        for path in self.paths:
            folder = Path(path)
            local = "://" not in os.fspath(path) and folder.is_dir()
            if local and out.is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"{self.out} lies inside {folder}, whose files are the documents: write the "
                    "store somewhere else"
                )
