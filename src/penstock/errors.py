"""What Penstock raises when something outside it is wrong.

    PenstockError
    ├── ConfigError     (ValueError)         a setting, an argument, a recipe
    ├── DataError       (ValueError)         bytes on disk that are not what they claim to be
    ├── MissingData     (FileNotFoundError)  nothing where data was expected
    ├── OutOfBounds     (IndexError, ValueError)   an index or a range past the end
    ├── StateMismatch   (ValueError)         a checkpoint that belongs to another run
    └── MissingExtra    (ImportError)        an optional dependency, with the line that installs it

Every message says what was found, what was expected, and what to do. Each class is also the
built-in error that the systems Penstock unites raise in its place, so old `except` lines work.
Our own invariants are `assert`s, never one of these.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Anything a user can mend."""


class ConfigError(PenstockError, ValueError):
    """A setting that cannot be meant."""


class DataError(PenstockError, ValueError):
    """Data on disk that is damaged, or that does not say what it is."""


class MissingData(PenstockError, FileNotFoundError):
    """No data where some was expected."""


class OutOfBounds(PenstockError, IndexError, ValueError):
    """An index or range outside the data."""


class StateMismatch(PenstockError, ValueError):
    """A state that was saved by a run over something else."""


class MissingExtra(PenstockError, ImportError):
    """A feature whose optional dependency is not installed."""
