"""Tables of samples, as `align sample` publishes them."""

import polars as pl

from align.schemas.samples import Prompt
from align.stages.storage.tables import TableFolder


def sample_table(folder, texts, *, kind="samples", chat=False, **columns):
    """Publishes samples: for each prompt its texts; `columns` have a value for each prompt."""
    rows = []
    for place, (prompt, own) in enumerate(texts.items()):
        asked = ({"role": "user", "content": prompt},) if chat else prompt
        for number, text in enumerate(own):
            rows.append(
                {
                    "prompt": [*asked] if chat else asked,
                    "prompt_key": Prompt(asked).key,
                    "number": number,
                    "completion": [{"role": "assistant", "content": text}] if chat else text,
                    "finish": "stop",
                    "prompt_tokens": 3,
                    "completion_tokens": 2,
                    **{name: values[place] for name, values in columns.items()},
                }
            )
    table = pl.DataFrame(rows, schema_overrides={"number": pl.Int32})
    output = TableFolder.at(str(folder), kind)
    output.prepare()
    output.publish(table, made_from={"prompts": "0" * 64}, settings={}, counts={})
    return str(folder)
