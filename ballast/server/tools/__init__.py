"""Tools: how model families write function calls, read back and enforced."""

from ballast.server.tools.delta import Arguments, Began, Content, Delta
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.parser import ToolParser
from ballast.server.tools.request import Function, Tools

__all__ = [
    "Arguments",
    "Began",
    "Content",
    "Delta",
    "Function",
    "ToolDialect",
    "ToolParser",
    "Tools",
]
