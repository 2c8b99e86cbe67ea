"""How `selfspec serve` keeps to JSON schemas, by keyword, on the cases of JSON-Schema-Test-Suite.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schema_cases.py JSON-Schema-Test-Suite/tests/draft2020-12 TOKENIZER

A group of cases is `refused` if its schema is, by name; `wrong` if an instance that does not fit could be an answer;
else `held`, or `narrower` if an instance that fits could not be one: properties are written in the order of the schema,
and none besides those named unless it speaks of others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RESULTS
from transformers import AutoTokenizer

from selfspec.errors import UnsupportedOptionError
from selfspec.files.writing import write_json
from selfspec.serve.grammar import Grammars


def outcome(grammars: Grammars, tokenizer: Any, group: dict[str, Any]) -> str:
    """Say how a group of cases ends."""
    if not isinstance(group["schema"], dict):
        return "refused"
    try:
        grammar = grammars.compiled(group["schema"])
    except UnsupportedOptionError:
        return "refused"
    fitting = []
    for case in group["tests"]:
        tokens = tokenizer(json.dumps(case["data"], ensure_ascii=False), add_special_tokens=False).input_ids
        matcher = grammar.matcher.deep_copy()
        fits = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        if fits and not case["valid"]:
            return "wrong"
        fitting.append(fits == case["valid"])
    return "held" if all(fitting) else "narrower"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="folder of a draft's cases")
    parser.add_argument("tokenizer", help="folder of a tokenizer")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    table, whole = {}, Counter[str]()
    for file in sorted(options.cases.glob("*.json")):
        groups = json.loads(file.read_text(encoding="utf-8"))
        counts = Counter(outcome(grammars, tokenizer, group) for group in groups)
        table[file.stem] = dict(sorted(counts.items()))
        whole += counts
    record = {"draft": options.cases.name, "groups": dict(sorted(whole.items())), "by_keyword": table}
    write_json(RESULTS / "json_schema_cases.json", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
