"""Draws settings, most of them hostile, and reads them as the commands do before any work.

They come as files, --set, --vary, flags that are texts, and DeepSpeed files. A case ends well if
every setting that is accepted is of its declared type, in its bounds and what was written, as
another reader of the text finds it; or if one message names the setting or the file.
"""

import dataclasses
import gc
import json
import math
import random
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml  # noqa: E402
from campaigns import hostile_settings, runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402

from align.pipeline.executors.executor import share_of  # noqa: E402
from align.pipeline.executors.ray_actors import workers_of  # noqa: E402
from align.pipeline.options.first_checks import asked_recipe  # noqa: E402
from align.pipeline.options.flags import parse_map  # noqa: E402
from align.pipeline.options.settings import flatten, load_settings, template  # noqa: E402
from align.pipeline.plan.setting_checks import bytes_of, require_effect, seconds_of  # noqa: E402
from align.pipeline.train.trials import trials_of, varied_by  # noqa: E402
from align.schemas.config import Config  # noqa: E402
from align.schemas.option import FACTS  # noqa: E402
from align.schemas.train_options import TrainOptions  # noqa: E402
from align.stages.methods.modifiers import Modifiers  # noqa: E402
from align.stages.methods.table import METHODS  # noqa: E402

BOUNDS = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "lt": lambda value, bound: value < bound,
}
LARGEST = 1 << 63
WORDS = {True: ("yes", "true", "on"), False: ("no", "false", "off")}


@dataclasses.dataclass(frozen=True)
class Declared:
    """The type and the bounds of a setting."""

    kind: Any
    bounds: dict[str, float]
    default: Any
    is_path: bool = False


@cache
def declared():
    """Every setting by its dotted name, and every option of a method."""
    found = {}
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            found |= _of(section.default_factory, section.name)
    for options in (Modifiers, *(method.options for method in METHODS.values())):
        found |= _of(options, "method")
    return found


def _of(options, section):
    kinds = get_type_hints(options)
    return {
        f"{section}.{each.name}": Declared(
            kinds[each.name],
            {name: each.metadata[name] for name in BOUNDS if each.metadata.get(name) is not None},
            getattr(options(), each.name),
            FACTS in each.metadata and each.metadata[FACTS].is_path,
        )
        for each in dataclasses.fields(options)
    }


def fault_of(name, one, value):
    """What is wrong with an accepted value, by the declaration alone."""
    if not _is_of(one.kind, value):
        return f"{name} is {value!r:.60}, and not of {one.kind}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value}"
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"{name} has {value.bit_length()} bits"
    for bound, holds in BOUNDS.items():
        if bound in one.bounds and not holds(value, one.bounds[bound]):
            return f"{name} is {value}, and not {bound} {one.bounds[bound]}"
    return ""


def _is_of(kind, value):
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind) and type(value) is str
    if get_origin(kind) is list:
        return type(value) is list and all(type(one) is str for one in value)
    if get_origin(kind) is dict:
        return type(value) is dict and all(
            type(one) is str for pair in value.items() for one in pair
        )
    if hasattr(kind, "__metadata__"):
        return _is_of(get_args(kind)[0], value)
    if get_args(kind):
        return any(_is_of(one, value) for one in get_args(kind))
    return type(value) is kind or (kind is float and type(value) is int)


def differs(node, value, *, is_path):
    """Whether a value is another than the text that another reader found in its place."""
    if isinstance(node, yaml.SequenceNode):
        pairs = zip(node.value, value, strict=False) if isinstance(value, list) else ()
        return not isinstance(value, list) or (
            len(value) != len(node.value)
            or any(differs(one, item, is_path=is_path) for one, item in pairs)
        )
    if isinstance(node, yaml.MappingNode):
        keys = {key.value: inside for key, inside in node.value}
        return not isinstance(value, dict) or (
            len(node.value) != len(keys)
            or {*keys} != {*value}
            or any(differs(keys[key], value[key], is_path=is_path) for key in keys)
        )
    if isinstance(value, str):
        if not is_path:
            return value != node.value
        return value != node.value and not value.endswith(
            str(Path(node.value.lstrip("~/"))).lstrip(".")
        )
    is_plain = not node.style
    if isinstance(value, bool):
        return not is_plain or node.value.lower() not in WORDS[value]
    if isinstance(value, list | dict):
        return True
    try:
        number = node.value.replace("_", "") if is_plain else "nan"
        return (int(number) if isinstance(value, int) else float(number)) != value
    except ValueError:
        return True


def written_in(text):
    """The nodes of a file's settings by their dotted names; those that are null are left out."""
    found = {}
    top = yaml.compose(text, Loader=yaml.CSafeLoader)
    for key, node in top.value if isinstance(top, yaml.MappingNode) else ():
        inner = node.value if isinstance(node, yaml.MappingNode) else ()
        found |= {f"{key.value}.{name.value}": value for name, value in inner}
        if not inner:
            found[key.value] = node
    return {name: node for name, node in found.items() if not is_null(node)}


def is_null(node):
    """Whether nothing is written there."""
    if isinstance(node, yaml.ScalarNode):
        return not node.style and node.value.lower() in ("", "~", "null")
    return isinstance(node, yaml.MappingNode) and not node.value


def refused_forms(text):
    """What no settings may hold: aliases and tags."""
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            return f"{event!r:.100} is accepted"
    return ""


def judged_settings(settings, *, text="", sets=()):
    """Whether accepted settings are sound, and what was written."""
    values = flatten(settings.config)
    options = {name.removeprefix("method."): of for name, of in values.items() if "method." in name}
    # An option of a method has the bounds of its method.
    known = {name for name in declared().keys() & values.keys() if "method." not in name}
    faults = [fault_of(name, declared()[name], values[name]) for name in sorted(known)]
    written = written_in(text)
    faults.append(refused_forms(text))
    for word in sets:
        name, _, given = word.partition("=")
        is_text = isinstance(getattr(declared().get(name), "default", None), str)
        node = yaml.ScalarNode("", given, style="'") if is_text else yaml.compose(given)
        written[name] = node
    for name, node in written.items():
        found = options.get(name.removeprefix("method.")) if "method." in name else values.get(name)
        is_path = name in declared() and declared()[name].is_path
        if found is None and name in declared() and (node is None or is_null(node)):
            continue
        if "method." not in name and differs(node, found, is_path=is_path):
            faults.append(f"{name} is {found!r:.80}, and written is {node!r:.80}")
    fault = next(filter(None, faults), "")
    return End("wrong" if fault else "same", fault)


def from_file(path, sets=(), command="config"):
    """The settings of a file, as a command reads them, with what it checks at once."""
    return load_settings({}, list(sets), file=path, command=command)


def file_case(draw, path):
    """A whole file with damaged bytes."""
    path.write_bytes(hostile_settings.damaged(_whole_file().encode(), draw))
    return _file_end(path)


@cache
def _whole_file():
    return template(None)


def value_case(draw, path):
    """A file with hostile values of a few settings."""
    path.write_text(hostile_settings.file_of(draw, _drawn(draw)), encoding="utf-8", newline="")
    return _file_end(path)


def rounds_case(draw, path):
    """The same as the rounds read it, with the settings that they need."""
    given = {"model.path": "m", "judge.by": "exact", "train.method": "dpo", "data.files": "[p]"}
    drawn = given | _drawn(draw)
    path.write_text(hostile_settings.file_of(draw, drawn), encoding="utf-8", newline="")
    return _file_end(path, "rounds")


def shape_case(draw, path):
    """A file of another shape than settings have."""
    path.write_bytes(hostile_settings.shape(draw))
    return _file_end(path)


def _file_end(path, command="config"):
    def judge(settings):
        return judged_settings(settings, text=path.read_text(encoding="utf-8"))

    return tried(partial(from_file, path, (), command), (path.name,), judge)


def _drawn(draw):
    names = [name for name in declared() if not name.startswith("method.")]
    chosen = draw.sample(names, draw.choice((1, 1, 1, 2, 4)))
    return {name: hostile_settings.value(draw, declared()[name]) for name in chosen}


def set_case(draw, path):
    """Words behind --set."""
    path.write_text("train: {lr: 0.5}\n")
    sets = hostile_settings.words(draw, declared())
    names = ("--set", *(word.partition("=")[0] for word in sets if "=" in word))
    last = {word.partition("=")[0]: word for word in sets}
    return tried(
        partial(from_file, path, sets),
        names,
        lambda settings: judged_settings(settings, sets=[*last.values()]),
    )


def method_case(draw, path):
    """A method's options, and settings that are held against each other."""
    method = draw.choice(
        (*METHODS, *METHODS, "dpo:0.8+sft:0.2", "dpo:1e999+sft", "kto+kto", "x" * 9)
    )
    names = [name for name in declared() if name.startswith("method.")]
    if method in METHODS and draw.random() < 0.9:
        own = {each.name for each in dataclasses.fields(METHODS[method].options)}
        names = [name for name in names if name[7:] in own] or names
    chosen = draw.sample(names, min(len(names), draw.choice((1, 1, 2))))
    values = {name: hostile_settings.value(draw, declared()[name]) for name in chosen}
    lines = hostile_settings.file_of(draw, {"train.method": method} | values)
    path.write_text(lines, encoding="utf-8", newline="")

    def read():
        settings = from_file(path, (), "train")
        recipe = asked_recipe(settings.config)
        require_effect(settings)
        return settings, recipe

    def judge(found):
        settings, recipe = found
        end = judged_settings(settings, text=path.read_text(encoding="utf-8"))
        for part in recipe.parts:
            kinds = _of(type(part.options), "method")
            for name, value in vars(part.options).items():
                node = written_in(path.read_text(encoding="utf-8")).get(f"method.{name}")
                fault = fault_of(name, kinds[f"method.{name}"], value)
                if node is not None and differs(node, value, is_path=False):
                    fault = f"not {node!r:.60}"
                if fault:
                    return End("wrong", f"method.{name} is {value!r:.60}: {fault}")
        return end

    names = (path.name, "method", *chosen, *(name[7:] for name in chosen))
    return tried(read, names, judge)


TEXTS = {
    "train.max_time": lambda text: seconds_of(text, name="train.max_time"),
    "--gpu": lambda text: bytes_of(text, name="--gpu"),
    "train.memory": lambda text: bytes_of(text, name="train.memory"),
    "--ray-workers": workers_of,
    "--part": lambda text: share_of(text, {}),
    "--map": lambda text: parse_map([text]),
    "--vary": lambda text: trials_of(["dpo", "kto"], varied_by([text])),
}


def word_case(draw, path):
    """Texts with a form of their own."""
    flag = draw.choice([*TEXTS])
    text = hostile_settings.formed(draw, flag)
    path.write_text(f"{flag} {text}", encoding="utf-8", errors="surrogatepass")

    def judge(found):
        numbers = re.findall(r"[\d.]+", text) if flag in ("train.max_time", "--gpu") else []
        is_sound = not numbers or (math.isfinite(found) and found >= 0)
        return End("same" if is_sound else "wrong", f"{found!r:.200}")

    # The table's own refusals name the method, the run or the setting.
    return tried(lambda: TEXTS[flag](text), (flag, text.partition("=")[0][:20] or flag), judge)


def deepspeed_case(draw, path):
    """A DeepSpeed file."""
    from align.stages.engine.deepspeed_config import EngineContext, engine_config  # noqa: PLC0415

    file = path.with_name("deepspeed.json")
    file.write_bytes(hostile_settings.deepspeed(draw))
    options = TrainOptions(method="dpo", deepspeed=str(file))

    def judge(config):
        theirs = json.loads(file.read_bytes())
        fault = _deepspeed_fault(config, theirs)
        return End("wrong" if fault else "same", fault)

    context = EngineContext("float32", hidden_size=8, world_size=1)
    return tried(lambda: engine_config(options, context), (file.name,), judge)


# These are the engine's own whatever the file says.
OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _deepspeed_fault(config, theirs):
    for name, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
        if isinstance(value, int) and abs(value) >= LARGEST:
            return f"{name} has {value.bit_length()} bits"
    found = dict(leaves(config))
    for name, value in leaves(theirs):
        ours = found.get(re.sub(r"^bfloat16\.", "bf16.", name), value)
        if value not in ("auto", None) and name not in OURS and ours != value:
            return f"{name} is {ours!r:.60}, and written is {value!r:.60}"
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return "" if type(stage) is int and 0 <= stage <= 3 else f"the stage is {stage!r}"


def leaves(value, name=""):
    """Every value that holds no others, by its dotted name."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        named = f"{name}.{key}" if name else str(key)
        if isinstance(one, dict | list):
            yield from leaves(one, named)
        else:
            yield named, one


KINDS = {
    "value": value_case,
    "file": file_case,
    "set": set_case,
    "method": method_case,
    "shape": shape_case,
    "deepspeed": deepspeed_case,
    "word": word_case,
    "rounds": rounds_case,
}


def name_of(seed):
    """What a seed draws."""
    return [*KINDS][seed % len(KINDS)]


def case(seed, folder):
    """Reads drawn settings."""
    path = folder / "case" / "align.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return KINDS[name_of(seed)](random.Random(seed), path)


def prepare(folder):
    """What the settings declare, before a check is left out."""
    from align.stages.engine import deepspeed_config  # noqa: F401, PLC0415

    declared()
    gc.collect()
    gc.freeze()  # else each case looks through all that torch has made


def without_bounds():
    """Reads settings without their bounds."""
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            for each in dataclasses.fields(section.default_factory):
                kept = {key: of for key, of in each.metadata.items() if key not in BOUNDS}
                each.metadata = MappingProxyType(kept)


CAMPAIGN = Campaign(__file__, name_of, case, prepare, plants={"bounds": without_bounds})

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
