"""The example at the end of the help of each command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

EXAMPLES = {
    "init": "align init --method kto --schema",
    "config": "align config --changed",
    "tiny-world": "align tiny-world world --rows 200",
    "check": "align check data.jsonl --model DIR",
    "precompute-ref": "align precompute-ref data.jsonl --model DIR --token-logps",
    "score": "align score data.jsonl --reward-model DIR",
    "verify": "align verify align-cache --rescore 64",
    "inspect": "align inspect align-cache --row data.jsonl:17",
    "export": "align export align-cache --output pairs.parquet",
    "sample": "align sample prompts.jsonl --model DIR -n 4",
    "judge": "align judge align-samples --by reward --reward-model DIR",
    "select": "align select align-judged --rows labels",
    "rounds": "align rounds align.yaml",
    "run": "align run data.jsonl --model DIR --method kto --lora --lr 1e-5",
    "train": "align train --method dpo --beta 0.1 --lr 1e-6 --eval-fraction 0.05",
    "plan": "align plan --method kto --gpu 24g --lora",
    "sweep": "align sweep --method dpo --method kto --lr 1e-6,1e-5",
    "methods": "align methods kto",
    "report": "align report align-run",
    "diff": "align diff runs/dpo runs/kto",
    "register": "align register align-run prefs --alias champion",
    "mlflow-sync": "align mlflow-sync align-run",
}


def complete_help(app: typer.Typer) -> None:
    """Ends the help of each command with its example."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        command.epilog = f"Example: {EXAMPLES[name]}"
