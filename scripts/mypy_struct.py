"""A mypy plugin: classes made by ``flax.struct.dataclass`` have a ``replace``, which its hints do not say.

Without it every ``state.replace(...)`` would be an error, or had to be left unchecked. See ``[tool.mypy]`` in pyproject.toml.
"""

from mypy.nodes import ARG_STAR2, Argument, Var
from mypy.plugin import ClassDefContext, Plugin
from mypy.plugins.common import add_method_to_class
from mypy.plugins.dataclasses import dataclass_class_maker_callback
from mypy.types import AnyType, TypeOfAny
from mypy.typevars import fill_typevars


def add_replace(context: ClassDefContext) -> bool:
    """Adds the method, and does what mypy does for dataclasses."""
    anything = AnyType(TypeOfAny.explicit)
    changes = Argument(Var("changes", anything), anything, None, ARG_STAR2)
    add_method_to_class(context.api, context.cls, "replace", [changes], fill_typevars(context.cls.info))
    return dataclass_class_maker_callback(context)


class StructPlugin(Plugin):
    """Knows the decorator."""

    def get_class_decorator_hook_2(self, fullname: str):
        """See :class:`mypy.plugin.Plugin`."""
        return add_replace if fullname == "flax.struct.dataclass" else None


def plugin(version: str):
    """What mypy asks a plugin's file for."""
    del version
    return StructPlugin
