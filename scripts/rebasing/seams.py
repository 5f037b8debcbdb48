# SPDX-License-Identifier: Apache-2.0
"""What overlay and patches take from upstream, checked in the source of one version.

Nothing is imported: a version that cannot be installed here is checked as well. Checked are
the names that the overlay imports, the methods that its classes override, the attributes of
upstream's objects that it uses, and that patched files use no name that they do not define: a
hunk may fit where a variable is called otherwise.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

BASES = {
    "PyKVCacheManager": ("vllm/v1/kv_offload/base.py", "OffloadingManager"),
    "PyKVCacheWorker": ("vllm/v1/kv_offload/base.py", "OffloadingWorker"),
    "PyKVCacheSpec": ("vllm/v1/kv_offload/base.py", "OffloadingSpec"),
}
"""Classes of the overlay -> whose methods they override."""

_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/offloading"
ATTRIBUTES = {
    (f"{_CONNECTOR}/scheduler.py", "OffloadingConnectorScheduler"): (
        "_chunks_being_loaded",
        "_mamba_align_size",
        "_req_status",
        "_sliding_window_groups",
        "config",
        "get_num_new_matched_tokens",
        "manager",
    ),
    (f"{_CONNECTOR}/worker.py", "OffloadingConnectorWorker"): ("worker", "_load_jobs"),
    ("vllm/v1/core/sched/request_queue.py", "PriorityRequestQueue"): ("_heap",),
    ("vllm/v1/core/sched/output.py", "SchedulerOutput"): (
        "finished_req_ids",
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "total_num_scheduled_tokens",
    ),
    ("vllm/v1/core/sched/output.py", "CachedRequestData"): ("resumed_req_ids",),
    ("vllm/v1/request.py", "Request"): (
        "block_hashes",
        "kv_transfer_params",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "resumable",
        "skip_reading_prefix_cache",
    ),
}
"""Attributes, fields and methods that the overlay uses and that no import mentions."""

Tree = Mapping[str, str]


def problems(tree: Tree, overlay: Path) -> list[str]:
    """What the overlay needs and the patched tree does not have.

    Args:
        tree: the patched version's Python files, path -> text.
        overlay: the checkout's ``vllm/``.
    """
    ours = {path: ast.parse(path.read_text("utf-8")) for path in sorted(overlay.rglob("*.py"))}
    found: list[str] = []
    for path, module in ours.items():
        name = path.relative_to(overlay.parent).as_posix()
        if name in tree:
            found.append(f"{name} hides upstream's file of the same name")
        found += [f"{name}: {text}" for text in _missing_imports(module, tree, overlay)]
        found += [f"{name}: {text}" for text in _unlike_base(module, tree)]
    return found + list(_missing_attributes(tree))


def _missing_imports(module: ast.Module, tree: Tree, overlay: Path) -> Iterator[str]:
    for node in ast.walk(module):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm."):
            continue
        path = (node.module or "").replace(".", "/")
        if (overlay.parent / f"{path}.py").is_file() or (overlay.parent / path).is_dir():
            continue
        text = tree.get(f"{path}.py", tree.get(f"{path}/__init__.py"))
        if text is None:
            yield f"imports {node.module}, which is not there"
            continue
        defined = _names(ast.parse(text))
        for alias in node.names:
            is_module = f"{path}/{alias.name}.py" in tree or f"{path}/{alias.name}/" in tree
            if alias.name not in defined and not is_module:
                yield f"imports {alias.name} from {node.module}, which does not define it"


def _names(module: ast.Module) -> set[str]:
    """What a module defines at its top level, under conditions too."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # modules that import lazily, by a table of names
    return names


def _unlike_base(module: ast.Module, tree: Tree) -> Iterator[str]:
    for node in module.body:
        if not isinstance(node, ast.ClassDef) or node.name not in BASES:
            continue
        path, name = BASES[node.name]
        base = _class(tree.get(path, ""), name)
        if base is None:
            yield f"{node.name} derives from {name}, which {path} does not define"
            continue
        ours, theirs = _methods(node), _methods(base)
        for method, upstream in theirs.items():
            if method not in ours:
                if _is_abstract(upstream):
                    yield f"{node.name} lacks {method}, which {name} demands"
                continue
            lacking = _parameters(upstream) - _parameters(ours[method])
            if lacking and ours[method].args.kwarg is None:
                yield f"{node.name}.{method} does not take {', '.join(sorted(lacking))}"


def _class(text: str, name: str) -> ast.ClassDef | None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(item).endswith("abstractmethod") for item in method.decorator_list)


def _parameters(method: ast.FunctionDef) -> set[str]:
    arguments = method.args
    return {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _missing_attributes(tree: Tree) -> Iterator[str]:
    for (path, name), attributes in ATTRIBUTES.items():
        node = _class(tree.get(path, ""), name)
        if node is None:
            yield f"{path} does not define {name}"
            continue
        assigned = {
            item.attr
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        }
        fields = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for attribute in attributes:
            if attribute not in assigned | fields | _methods(node).keys():
                yield f"{name} has no attribute {attribute} any more"


def undefined_names(folder: Path, files: Iterable[str]) -> list[str]:
    """Names that the files use and nothing defines (ruff's F821)."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    done = subprocess.run(
        [*command, "--output-format", "concise", *sorted(files)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in done.stdout.splitlines() if "F821" in line]
