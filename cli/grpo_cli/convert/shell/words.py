"""Words of a script as bash expands them: quotes, variables, arrays, defaults, and marks for what is not known."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Iterator

from grpo_cli.convert.shell.state import Knowledge, Value, is_known
from grpo_cli.convert.shell.tree import Node

Part = tuple[Value, bool]  # a value, and whether it stays whole where a word is split
_BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_SPLIT, _WHOLE = "\ue002", "\ue003"  # between two words, and before a value that is one even if it is empty
_OF_A_RUN = re.compile(
    r"[0?$!_-]|RANDOM|SECONDS|BASH_SOURCE|HOSTNAME|PWD|OLDPWD|UID|EUID|PPID|LINENO|SHLVL|BASHPID|OSTYPE|FUNCNAME"
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\033"}


class Words(Knowledge):
    """Values of the nodes of a tree, in the present state."""

    arithmetic: Callable[[Node], int | None]  # of Conditions
    printed: Callable[[Node], str]  # of Script: what $(...) prints

    def assign(self, node: Node) -> None:
        """Do NAME=value, NAME+=value, NAME=(...) or NAME+=(...)."""
        name = node["Name"]["Value"]
        old = self.state.variables.get(name) if node.get("Append") else None
        elements = (node.get("Array") or {}).get("Elems") or []
        if "Index" in node or any("Index" in element for element in elements):
            self.put(name, self.mark(node, f"{name}[...]= is not read"))
        elif "Array" in node:
            new = [word for element in elements if "Value" in element for word in self.fields(element["Value"])]
            self.put(name, ([old] if isinstance(old, str) else old or []) + self.unsure(new))
        else:
            value = self.word(node["Value"]) if node.get("Value") else ""
            if isinstance(old, list):
                self.put(name, [(old[0] if old else "") + value, *old[1:]])
            elif node.get("Append") and old is None and name not in self.state.variables:
                self.put(name, self._unset(node["Name"], name) + value if self.state.sourced else value)
            else:
                self.put(name, (old or "") + value)

    def word(self, node: Node, *, quoted: bool = False) -> str:
        """Return a word that is not split."""
        return _joined(self.parts(node.get("Parts", []), quoted))

    def pattern(self, node: Node) -> str:
        """Return a word as a pattern of fnmatch: what is quoted means itself."""
        written = ""
        for part in node.get("Parts", []):
            if part["Type"] == "Lit":
                written += re.sub(r"\\(.)", lambda found: glob.escape(found[1]), part["Value"])
            else:
                value = _joined(self.parts([part], False))
                written += value if part["Type"] in ("ParamExp", "CmdSubst") else glob.escape(value)
        return written.replace("[^", "[!")

    def fields(self, node: Node) -> list[str]:
        """Return the words that one written word becomes: unquoted values are split, "${A[@]}" is spread."""
        shape = "".join(part["Value"] if part["Type"] == "Lit" else "_" for part in node["Parts"])
        if _BRACES.search(re.sub(r"\\.", "_", shape)):
            return [self.mark(node, "braces are not expanded")]
        text = ""
        for value, whole in self.parts(node["Parts"], False):
            if whole:
                text += _SPLIT.join(_WHOLE + one for one in ([value] if isinstance(value, str) else value))
            else:
                text += re.sub(r"[ \t\n]+", _SPLIT, _text(value))
        return [word.replace(_WHOLE, "") for word in text.split(_SPLIT) if word]

    def document(self, redirect: Node) -> str:
        """Return the text of a here-document; with a quoted delimiter its text means itself."""
        parts = redirect["Hdoc"].get("Parts") or []
        if any(part["Type"] != "Lit" or "\\" in part["Value"] for part in redirect["Word"]["Parts"]):
            return "".join(part["Value"] for part in parts)
        return self.word({"Parts": parts}, quoted=True)

    def parts(self, parts: list[Node], quoted: bool, *, within: bool = False) -> Iterator[Part]:
        """Yield the values of a word's parts; text `within` an unquoted ${A:-...} is split, too."""
        for part in parts:
            match part["Type"]:
                case "Lit":
                    text = part["Value"].replace("\\\n", "")
                    if not quoted and part is parts[0] and re.match(r"~(/|$)", text):
                        text = _text(self.state.variables.get("HOME", "~")) + text[1:]
                    yield re.sub(r'\\([$`"\\])' if quoted else r"\\(.)", r"\1", text), not within
                case "SglQuoted" if quoted:  # in "${A:-'b'}" quotes mean themselves
                    yield self.text(part), True
                case "SglQuoted":
                    yield self._single(part), True
                case "DblQuoted":
                    inner = list(self.parts(part.get("Parts") or [], True))
                    yield from [(value, True) for value, _ in inner] if inner else [("", True)]
                case "ParamExp":
                    yield from self._parameter(part, quoted)
                case "ArithmExp":
                    number = self.arithmetic(part["X"])
                    yield (self.mark(part, "not a known number") if number is None else str(number)), True
                case "CmdSubst":
                    yield self.printed(part), quoted
                case _:
                    yield self.mark(part, f"{part['Type']} is not read"), True

    def _single(self, part: Node) -> str:
        text = str(part.get("Value", ""))
        if not part.get("Dollar"):
            return text
        if set(re.findall(r"\\(.)", text.replace("\\\\", ""))) - _ESCAPES.keys():
            return self.mark(part, "this escape is not read")
        return re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], text)

    def _parameter(self, node: Node, quoted: bool) -> Iterator[Part]:
        value, operation = self._value(node), node.get("Exp") or {"Op": ""}
        op, word = operation["Op"], operation.get("Word") or {}
        if any(node.get(key) for key in ("Excl", "Slice", "Width", "Names", "Flags")):
            yield self.mark(node, "this expansion is not read"), quoted
        elif node.get("Length"):
            known = value is not None and is_known(value)
            yield (str(len(value or "")) if known else self.mark(node, "not known")), True
        elif node.get("Repl"):
            yield self._replaced(node, value), quoted
        elif op in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            is_set = value is not None and (op[0] != ":" or self.plain(_text(value)) != "")
            if op[-1] == "+" and op[0] == ":" and value is not None and self.plain(_text(value)) is None:
                yield self.mark(node, "it is not known whether this is empty"), quoted
            elif op[-1] == "+":
                yield from self.parts(word.get("Parts", []), quoted, within=not quoted) if is_set else [("", quoted)]
            elif is_set and value is not None:
                yield self._starred(node, value, quoted), quoted
            elif op[-1] == "?":
                yield self._unset(node, node["Param"]["Value"]), quoted
            else:
                if op[-1] == "=":
                    self.put(node["Param"]["Value"], self.word(word, quoted=quoted))
                yield from self.parts(word.get("Parts", []), quoted, within=not quoted)
        elif value is None:
            yield self._unset(node, node["Param"]["Value"]), quoted
        elif op:
            yield self._changed(node, value, op, word), quoted
        else:
            yield self._starred(node, value, quoted), quoted

    def _starred(self, node: Node, value: Value, quoted: bool) -> Value:
        """Quoted, $* and ${A[*]} are one word."""
        is_star = node["Param"]["Value"] == "*" or ("Index" in node and self.text(node["Index"]) == "*")
        return " ".join(value) if quoted and is_star and isinstance(value, list) else value

    def _unset(self, node: Node, name: str) -> str:
        if self.state.sourced and not name.isdigit():
            return self.mark(node, f"{name} may be set: {self.state.sourced}")
        return self.mark(node, f"{name} is not set in the script", is_unset=True)

    def _value(self, node: Node) -> Value | None:
        """A parameter without what its expansion does to it; None if it is not set."""
        name, arguments = node["Param"]["Value"], self.state.arguments
        if name in ("@", "*"):
            return list(arguments)
        if name == "#":
            return str(len(arguments)) if is_known(arguments) else self.mark(node, "the arguments are not known")
        if _OF_A_RUN.fullmatch(name):
            return self.mark(node, "only a run says it")
        if name.isdigit() and int(name) <= len(arguments):
            return arguments[int(name) - 1]
        value = self.variable(name)
        if value is None and self.state.sourced and not name.isdigit():
            return self._unset(node, name)
        if "Index" not in node:
            return (value[0] if value else None) if isinstance(value, list) else value
        index = self.text(node["Index"])
        if index in ("@", "*"):
            return [] if value is None else value
        if value is None:
            return None
        elements = [value] if isinstance(value, str) else value
        number = self.arithmetic(node["Index"])
        # A mark may stand for several elements.
        if number is None or number < 0 or not is_known(elements[: number + 1]):
            return self.mark(node, "this element is not known")
        return elements[number] if number < len(elements) else None

    def _replaced(self, node: Node, value: Value | None) -> str:
        old, new = self.pattern(node["Repl"]["Orig"]), self.word(node["Repl"].get("With") or {})
        is_plain = not re.search(r"[*?\[\\]|^[#%]", old) and "&" not in new
        if isinstance(value, str) and is_known([value, old, new]) and is_plain:
            return value.replace(old, new, -1 if node["Repl"].get("All") else 1) if old else value
        return self.mark(node, "this replacement is not read")

    def _changed(self, node: Node, value: Value, op: str, word: Node) -> str:
        """${A#pattern}, ${A%pattern}, ${A,,} and ${A^^}."""
        pattern = self.pattern(word)
        if isinstance(value, str) and is_known([value, pattern]) and "[:" not in pattern:
            if op in (",,", "^^") and not word:
                return value.lower() if op == ",," else value.upper()
            if op in ("#", "##", "%", "%%"):
                sizes = range(len(value) + 1) if op in ("#", "%%") else range(len(value), -1, -1)
                for size in sizes:
                    cut, rest = (value[:size], value[size:]) if op[0] == "#" else (value[size:], value[:size])
                    if fnmatch.fnmatchcase(cut, pattern):
                        return rest
                return value
        return self.mark(node, "this expansion is not read")


def _text(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _joined(parts: Iterable[Part]) -> str:
    return "".join(_text(value) for value, _ in parts)
