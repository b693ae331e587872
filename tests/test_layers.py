"""Which module may import which: part by part, and inside each folder module by module. The arrows go one way."""

import ast
from pathlib import Path

import sfumato

SOURCE = Path(sfumato.__file__).parent

# A part is a top-level module or a folder. It may import the parts named here, and itself.
PARTS: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "ids": set(),
    "progress": set(),
    "direction": set(),
    "arrays": set(),
    "gaussian": {"arrays", "files"},
    "distances": {"direction", "gaussian"},
    "inclusion": {"gaussian"},
    "matching": {"arrays", "distances", "gaussian"},
    "metrics": {"arrays"},
    "calibration": {"arrays", "direction", "distances", "errors", "files", "gaussian", "matching", "metrics"},
    "data": {"errors", "files", "gaussian", "ids", "metrics"},
    "encoders": {"data", "errors", "files", "gaussian", "progress"},
    "losses": {"arrays", "distances", "gaussian", "inclusion", "matching"},
    "posthoc": {"calibration", "distances", "files", "gaussian", "losses"},
    "search": {
        "calibration",
        "direction",
        "distances",
        "errors",
        "files",
        "gaussian",
        "ids",
        "matching",
        "metrics",
        "progress",
    },
    "evaluation": {
        "calibration",
        "data",
        "direction",
        "distances",
        "errors",
        "files",
        "gaussian",
        "inclusion",
        "matching",
        "metrics",
        "search",
    },
    "models": {
        "arrays",
        "calibration",
        "data",
        "direction",
        "distances",
        "encoders",
        "errors",
        "evaluation",
        "files",
        "gaussian",
        "ids",
        "losses",
        "matching",
        "metrics",
        "progress",
        "search",
    },
    "training": {
        "calibration",
        "data",
        "direction",
        "distances",
        "encoders",
        "errors",
        "evaluation",
        "files",
        "gaussian",
        "losses",
        "metrics",
        "models",
        "progress",
        "search",
    },
    "studies": {
        "arrays",
        "calibration",
        "data",
        "direction",
        "distances",
        "encoders",
        "errors",
        "evaluation",
        "files",
        "gaussian",
        "inclusion",
        "losses",
        "matching",
        "metrics",
        "models",
        "posthoc",
        "progress",
        "search",
        "training",
    },
    "reports": {
        "calibration",
        "data",
        "direction",
        "distances",
        "encoders",
        "errors",
        "evaluation",
        "files",
        "gaussian",
        "matching",
        "metrics",
        "models",
        "search",
        "studies",
    },
    "api": {
        "arrays",
        "data",
        "direction",
        "distances",
        "encoders",
        "errors",
        "evaluation",
        "gaussian",
        "matching",
        "models",
        "metrics",
        "progress",
        "reports",
        "search",
    },
    "demo": {
        "api",
        "data",
        "errors",
        "evaluation",
        "files",
        "gaussian",
        "metrics",
        "models",
        "reports",
        "search",
        "training",
    },
    "serve": {"calibration", "data", "encoders", "errors", "files", "gaussian", "ids", "models", "search", "studies"},
    "cli": {
        "api",
        "data",
        "demo",
        "errors",
        "evaluation",
        "gaussian",
        "matching",
        "models",
        "progress",
        "reports",
        "search",
        "serve",
        "studies",
        "training",
    },
    "__main__": {"cli"},
    "__init__": set(),
}

# The floors of each folder, lowest first. A module may import modules of lower floors of its folder, none of its own
# floor.
FLOORS: dict[str, list[str]] = {
    "distances": [
        "distance",
        "blockwise separable",
    ],
    "metrics": [
        "bootstrap relevance reliability uncertainty",
        "binned retrieval selective",
    ],
    "calibration": [
        "logistic query_scores reference",
        "abstention conditional drift platt",
        "calibrator",
    ],
    "data": [
        "image_decoding",
        "augment embedding_files transforms",
        "images",
        "embedding_tables",
        "pairs",
        "emoji karpathy noise region_features shards wordings",
        "captioned image_inputs item_images",
        "cub folder manifest",
        "embedding_pairs listings",
        "sources",
    ],
    "encoders": [
        "features package_weights precision",
        "open_clip",
        "encoder_protocol heads",
        "clip_transformers dual processors",
        "clip efficientnet gru regions resnet small",
        "joint",
        "frozen",
        "embeddings",
        "encoder_registry",
    ],
    "losses": [
        "dispersion labels",
        "base tiles",
        "infonce pcme prolip triplet",
        "daa pcmepp pvse",
    ],
    "posthoc": [
        "evidence method spherical",
        "adapter_networks curvature top1 whitened",
        "adapter_method laplace margins",
        "asymvlm probvlm variance_adapters",
        "method_registry",
    ],
    "search": [
        "atomic_folder exact lifting parts screening stores stores.faiss stores.nearest stores.protocol",
        "guarantees stores.store_url",
        "gallery",
        "collection index stores.local_database stores.milvus stores.pgvector",
        "stores.version_0_1",
        "stores.local",
        "stores.rerank",
    ],
    "evaluation": [
        "estimators ground_truth hits papers protocols",
        "published",
        "benchmark_ground_truths trust",
        "ambiguity benchmarks",
        "per_query strategies",
        "embedded_input",
        "compare",
    ],
    "models": [
        "pretrained_tensors process_group recipe unfamiliar",
        "pretrained_pcme run",
        "embed preferred_recipe pretrained",
        "calibrate export extract_regions ingest",
        "cross_fitting gallery_calibration",
        "adopt galleries trust_run",
    ],
    "training": [
        "optim step",
        "batches variance_stage",
        "setup",
        "loop",
        "ablation",
    ],
    "studies": [
        "audit corruption frozen_model maps peak_memory phrase_boxes toy words zeroshot",
        "contestants crops paper_tables sets",
        "analyse referee",
        "figure_numbers",
    ],
    "reports": [
        "charts formatting page_files referee_tables tables",
        "console paper_files prompt_charts report_charts study_pages",
        "console_referee console_trust paper_figures",
        "report",
        "model_report",
    ],
    "api": [
        "answers reliability_plot",
        "loaded",
    ],
    "serve": [
        "settings",
        "decode_worker schemas",
        "limits vectors",
        "decoding examples guard",
        "answering batching store_health sweep",
        "service",
        "server writing",
        "app",
    ],
    "cli": [
        "common outputs",
        "embed_commands evaluate_commands search_commands study_commands table_commands train_commands",
    ],
}

# What must not be reached, through whatever lies between.
NEVER = [("serve", "training"), ("evaluation", "training"), ("models", "training"), ("search", "models")]


def name_of(path: Path) -> str:
    """The dotted name below sfumato; a folder's __init__ is the folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The modules of sfumato that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.removeprefix("sfumato.")
            if inside == name or inside == "__version__":
                continue
            known = inside if inside in MODULES else inside.rpartition(".")[0]
            assert known in MODULES, f"{path}:{node.lineno}: there is no module sfumato.{inside}"
            found.add(known)
    return found


IMPORTS = {name: imports_of(path) - {name} for name, path in MODULES.items()}


def part_of(name: str) -> str:
    return name.split(".")[0]


def test_parts_import_what_the_table_says():
    found: dict[str, set[str]] = {part_of(name): set() for name in MODULES}
    for name, imported in IMPORTS.items():
        found[part_of(name)] |= {part_of(other) for other in imported} - {part_of(name)}
    assert found == PARTS, "a new part or a new arrow; say it in PARTS, or leave it out of the code"


def test_modules_import_from_lower_floors_of_their_folder():
    floor_of = {
        f"{part}.{name}": k for part, rows in FLOORS.items() for k, row in enumerate(rows) for name in row.split()
    }
    inside = {name for name in MODULES if "." in name}
    unplaced = sorted(set(floor_of) ^ inside)
    assert not unplaced, f"modules without a place in FLOORS, or places without a module: {unplaced}"
    wrong = {
        name: sorted(up)
        for name in inside
        if (up := {o for o in IMPORTS[name] if part_of(o) == part_of(name) and floor_of.get(o, -1) >= floor_of[name]})
    }
    assert not wrong


def test_no_module_imports_itself_through_others():
    left = dict(IMPORTS)
    while ready := [name for name, imported in left.items() if not imported & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"a cycle among {sorted(left)}"


def reached_from(part: str) -> set[str]:
    """The modules of a part and all that they import, directly or through others."""
    reached = {name for name in MODULES if part_of(name) == part}
    while more := {other for name in reached for other in IMPORTS[name]} - reached:
        reached |= more
    return reached


def test_what_must_not_be_reached_is_not_reached():
    for start, end in NEVER:
        assert not {name for name in reached_from(start) if part_of(name) == end}, f"{start} reaches {end}"


def test_the_service_stands_on_models_and_the_map():
    above = {"training", "studies", "reports", "demo", "cli"}
    assert {name for name in reached_from("serve") if part_of(name) in above} == {"studies.maps"}


def test_no_two_modules_have_one_name():
    last = [name.rpartition(".")[2] for name in MODULES]
    assert sorted(set(last)) == sorted(last), sorted({name for name in last if last.count(name) > 1})
