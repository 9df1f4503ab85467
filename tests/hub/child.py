"""A process with a Hub of its own choosing: streams a dataset as it is told, a line a command.

    ["make", {"dataset_name": …}]  ["rows", 5]  ["state", null]  ["load", {…}]  ["revision", null]

It answers each with a line: what was asked for, or {"error": [type, words]}.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from tests.hub.support import row_tokens

from penstock import PenstockError, StreamingHuggingFaceDataset


def answer(dataset: Any, command: str, value: Any) -> Any:
    match command:
        case "rows":
            return [row_tokens(row) for row in itertools.islice(dataset, value)]
        case "state":
            return dataset.state_dict()
        case "load":
            return dataset.load_state_dict(value)
    return dataset.revision


def main() -> None:
    dataset: Any = None
    for line in sys.stdin:
        command, value = json.loads(line)
        said: Any = None
        try:
            if command == "make":
                dataset = StreamingHuggingFaceDataset(**value)
            else:
                said = answer(dataset, command, value)
        except PenstockError as error:
            said = {"error": [type(error).__name__, str(error)]}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
