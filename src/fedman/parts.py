"""Parts of a run that a user can bring: algorithms, tasks, penalties, optimisers, by name or as `module:Name`.

A part is a frozen dataclass whose fields are its hyper-parameters. Everything here imports without torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields
from functools import cache, cached_property
from importlib import import_module
from inspect import get_annotations, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_type_hints

from fedman.errors import UserError, describe, did_you_mean, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

Value = TypeVar("Value", bool, int, float, str)
Part = TypeVar("Part")
Hyper = Mapping[str, bool | int | float | str]


def hyperparameter(default: Value, description: str, minimum: float = 0.0, maximum: float = math.inf) -> Value:
    """A dataclass field; its metadata are keyword arguments of `pydantic.Field`. Bounds hold for numbers."""
    given: dict[str, float] = {} if isinstance(default, bool | str) else {"ge": minimum, "le": maximum}
    bounds = {name: bound for name, bound in given.items() if math.isfinite(bound)}  # a whole number has no other
    made: Value = field(default=default, metadata={"description": description, **bounds})
    return made


def hyperparameters(part: type[Any]) -> dict[str, bool | int | float | str]:
    """The hyper-parameters of a part and their defaults: {"alpha": 0.01, ...}."""
    return {f.name: cast(Any, f.default) for f in fields(part)}


class Registry(Mapping[str, type[Part]], Generic[Part]):
    """The parts of one kind by name: those of fedman, of installed packages, and a user's own.

    A package announces its parts as entry points of the group `fedman.algorithms` (`.tasks`, ...; `plural` where it is
    not the kind + s). `registry[name]` also takes `module:Name`, looked for in the working directory too. Iteration is
    over names, the first is the default.
    """

    def __init__(self, kind: str, base: type[Part], built_in: Mapping[str, type[Part]], *, plural: str = "") -> None:
        self.kind, self.base, self.built_in = kind, base, dict(built_in)
        self.group = f"fedman.{plural or kind + 's'}"
        self._given: dict[str, type[Part]] = {}

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """What installed packages announce. fedman's own names cannot be replaced."""
        found: EntryPoints = announced().select(group=self.group)
        return {each.name: each for each in found if each.name not in self.built_in}

    @property
    def default(self) -> str:
        """The first name."""
        return next(iter(self.built_in))

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self.installed

    def __len__(self) -> int:
        return len(self.built_in) + len(self.installed)

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.installed

    def __getitem__(self, name: str) -> type[Part]:
        """The part with this name; `UserError` if there is none, or if it is not fit for its purpose."""
        if name in self.built_in:
            return self.built_in[name]
        if name in self._given:
            return self._given[name]
        target = self.installed[name].value if name in self.installed else name
        return self.check(find(self.kind, target, self), target)

    def name_of(self, part: Part) -> str:
        """The name under which `registry[name]` finds the class of an instance in this process, which makes an equal
        one of its hyper-parameters."""
        kind = part if isinstance(part, type) else type(part)
        if not isinstance(part, self.base):
            raise UserError(f"{self.kind}: {kind.__name__} is not {self._wanted}{did_you_mean(kind.__name__, self)}")
        for name, known in self.built_in.items():
            if known is kind:
                return name
        name = f"{kind.__module__}:{kind.__qualname__}"
        self._given[name] = self.check(kind, name)
        self._require_fields(part, name)
        return name

    def _require_fields(self, part: Part, name: str) -> None:
        """Refuse an instance that its hyper-parameters do not make again: whose constructor takes more than these, or
        changes them."""
        own = {f.name: getattr(part, f.name) for f in fields(cast(Any, part))}
        try:
            again = type(part)(**own)
        except Exception as error:  # its constructor may raise anything
            given, why = ", ".join(own) or "none", describe(error)
            raise UserError(f"{self.kind}: {name} cannot be made from its hyper-parameters, {given} ({why})") from error
        for key, value in own.items():
            if not _same(value, getattr(again, key)):
                how = f"of {value!r} its constructor makes {getattr(again, key)!r}"
                raise UserError(
                    f"{self.kind}: {name} changes its hyper-parameter {key}: {how}; leave fields as they are"
                )
        if {*signature(type(part)).parameters} <= {*own}:
            return  # all else follows from them
        for key, value in getattr(part, "__dict__", {}).items():
            if key not in own and not _same(value, vars(again).get(key)):
                raise UserError(
                    f"{self.kind}: {name} keeps {key} outside its hyper-parameters, where it would be lost; make it a "
                    f"field of a frozen dataclass ({key}: float = hyperparameter(...)) or a constant of the class"
                )

    def check(self, part: object, name: str) -> type[Part]:
        """`part`, if it is a class of this kind whose fields are hyper-parameters."""
        if not isinstance(part, type) or not issubclass(part, self.base):
            raise UserError(f"{self.kind}: {name} is {_article(part)}, not {self._wanted}")
        own = {key for key, kind in get_annotations(part).items() if "ClassVar" not in str(kind)}
        if own - set(hyperparameters(part)):
            raise UserError(f"{self.kind}: {name} is not a dataclass; put @dataclass(frozen=True) before it")
        constants = (key for key, kind in get_annotations(self.base).items() if "ClassVar" in str(kind))
        missing = [*getattr(part, "__abstractmethods__", ()), *(key for key in constants if not hasattr(part, key))]
        if missing:
            raise UserError(f"{self.kind}: {name} does not define {', '.join(sorted(missing))}")
        found: type[Part] = part
        types = hints(self.kind, part, name)
        for f in fields(cast(Any, part)):
            if f.default is MISSING:
                raise UserError(f"{self.kind}: {f.name} of {name} has no default; every hyper-parameter needs one")
            if types[f.name] not in (bool, int, float, str):
                raise UserError(f"{self.kind}: {f.name} of {name} is {f.type}; allowed are bool, int, float and str")
            if type(f.default) not in ((int, float) if types[f.name] is float else (types[f.name],)):
                raise UserError(f"{self.kind}: the default of {f.name} of {name} is {f.default!r}, not {f.type}")
        return found

    @property
    def _wanted(self) -> str:
        return f"a subclass of {self.base.__module__.removesuffix('.base')}.{self.base.__name__}"


@cache
def announced() -> Any:  # EntryPoints; in Python 3.11 SelectableGroups, with the same `select`
    """What all installed packages announce: their files are read once, and only where a name is none of fedman's."""
    from importlib.metadata import entry_points

    return entry_points()


def hints(kind: str, part: type[Any], name: str) -> dict[str, Any]:
    """The types of a part's fields."""
    try:
        return get_type_hints(part)
    except (NameError, TypeError, AttributeError) as error:
        raise UserError(f"{kind}: the types of {name}'s fields are not known: {error}") from None


def find(kind: str, name: str, known: Mapping[str, object] = {}) -> Any:
    """The object that `module:Name` means. An error names the part of the run (`kind`) and shows what went wrong."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise UserError(f"{kind}: no {kind} named {name!r}{nearest(name, known)}")
    try:
        found = _import(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"{kind}: {name} cannot be imported ({why})") from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise UserError(f"{kind}: {module} has no {attribute}{nearest(step, public)}")
        found = getattr(found, step)
    return found


def _import(module: str) -> Any:
    """A module, also from the working directory, which is not on the path of an installed command."""
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return import_module(module)
    finally:
        if added:
            sys.path.remove(here)


def _same(one: object, other: object) -> bool:
    """Whether two values are equal, arrays in all their entries."""
    try:
        equal: Any = one is other or one == other
        return bool(equal if isinstance(equal, bool) else equal.all())
    except Exception:  # of different shapes, or not to be compared
        return False


def _article(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
