"""`NKIObject`, the base class of what a kernel may create and pass around."""

from __future__ import annotations

import inspect
from typing import Any


class NKIObject:
    """Base class of objects a kernel may make and pass around.

    Any class attribute is a field, annotated or not; a field without a value defaults to None; the initializer is made
    whether `@dataclass` is there or not (nki-language-guide.rst, "Classes").
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = dict(inspect.get_annotations(cls))
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__"):
                annotations.setdefault(name, Any)
        cls.__annotations__ = annotations
        for name in annotations:
            if name not in vars(cls):
                setattr(cls, name, None)
        if "__init__" not in vars(cls) and annotations:
            cls.__init__ = _initializer(tuple(annotations))  # type: ignore[misc]


def _initializer(fields: tuple[str, ...]) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) > len(fields) or not set(kwargs) <= set(fields):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(fields)}")
        for name, value in (*zip(fields, args, strict=False), *kwargs.items()):
            object.__setattr__(self, name, value)  # frozen dataclasses too
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    return __init__
