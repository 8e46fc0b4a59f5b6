"""README.md and docs/ show what the repository holds: commands, JSON, Python, paths, links and figures."""

import ast
import configparser
import importlib
import importlib.util
import json
import pydoc
import re
import shlex
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, Field

import zeropp_fp8
from benchmarks.report import configuration, pictures
from benchmarks.report.configuration import page
from tests.places import ROOT
from zeropp_fp8.__main__ import COMMANDS
from zeropp_fp8.config import RECIPES, SECTION, resolve
from zeropp_fp8.config.sections import PluginConfig

RESULTS = ROOT / "benchmarks/results"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
README = PAGES["README.md"]
EACH_PAGE = pytest.mark.parametrize("name", sorted(PAGES))
FOLDERS = "ds_configs|examples|benchmarks|tests|zeropp_fp8|docs"
# A ds_config as far as the plugin looks at it; what a page shows of one is put into it.
STAGE_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
# Keys of DeepSpeed's that pages show by themselves, with the value shown.
OF_DEEPSPEED = (
    {"timers": {"throughput": {"synchronized": False}}},
    {"torch_adam": True},
    {"stage": 3},
    {"zero_force_ds_cpu_optimizer": False},
    {"load_universal": True},
    {"tensorboard": {"enabled": True}},
    {"comms_logger": {"enabled": True, "prof_all": True}},
    {"flops_profiler": {"enabled": True}},
)


def blocks(text, language=""):
    """The texts of the code blocks in a language; commands and drawings are in those without one."""
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M) if name == language]


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def spans(text):
    """Return what stands in `backticks`, on one line or across two."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def of_all_pages(found):
    """(page, what `found` gives of its text), one by one, as parameters of a test."""
    return [pytest.param(each, id=f"{name}-{n}") for name in sorted(PAGES) for n, each in enumerate(found(PAGES[name]))]


# -- the pages


def test_the_readme_is_a_page():
    assert README.count("\n") <= 150


@EACH_PAGE
def test_lines_are_not_long(name):
    lines = [line for line in prose(PAGES[name]).splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 120, max(lines, key=len)


def test_the_site_has_every_page():
    def files(entries):
        for entry in entries:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else files(value)

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(files(config["nav"])) == sorted(path.name for path in ROOT.glob("docs/*.md"))
    assert config["strict"]


def test_plugins_of_the_site_are_installed():
    """By the extra `docs`, and by the target that builds the site; `search` is a part of mkdocs."""
    plugins = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    names = {"mkdocs", *(plugin if isinstance(plugin, str) else next(iter(plugin)) for plugin in plugins)} - {"search"}
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extra = settings["options.extras_require"]["docs"].split()
    assert {name.partition("[")[0] for name in extra} == names
    (installed,) = re.findall(r"pip install --quiet -c constraints.txt (ruff .*)", (ROOT / "Makefile").read_text())
    assert shlex.split(installed)[1:] == extra


DRAWINGS = sorted(path.name for path in ROOT.glob("docs/*") if path.suffix != ".md")


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_drawing_is_shown_and_can_be_read(name):
    """On a light page and on a dark one: it has a paper of its own, and each colour in both."""
    text = (ROOT / "docs" / name).read_text()
    drawing = xml.fromstring(text)
    kinds = {element.tag.rpartition("}")[2] for element in drawing.iter()}
    assert kinds >= {"title", "desc", "text"} and len(text) < 10_000
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    used = {word for element in drawing.iter() for word in element.get("class", "").split()}
    filled = {name for name in used if re.search(rf"\.{name} {{[^}}]*: #", light)}
    assert "paper" in filled and {name for name in filled if not re.search(rf"\.{name} {{[^}}]*: #", dark)} == set()
    assert any(f"]({name})" in page for page in PAGES.values())


def test_the_first_page_leads_to_every_other():
    assert [name for name in PAGES if name.startswith("docs/") and f"]({name[5:]}" not in PAGES["docs/index.md"]] == [
        "docs/index.md"
    ]


@EACH_PAGE
def test_every_placeholder_is_filled(name):
    assert "@@" not in PAGES[name] and "TODO" not in PAGES[name]


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@EACH_PAGE
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[name])):
        if target.startswith("https://"):
            continue
        path, _, place = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.is_file(), target
        if place:
            assert place in map(anchor, re.findall(r"^#+ (.*)", file.read_text(), flags=re.M)), target


@EACH_PAGE
def test_every_path_named_exists(name):
    named = [span for span in spans(PAGES[name]) if re.fullmatch(rf"(?:{FOLDERS})(?:/[\w./-]*)?", span)]
    for path in named:
        assert (ROOT / path).exists(), path
    files = {path.name for folder in ("zeropp_fp8", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    files |= {"zero_to_fp32.py", "main.py", "e2e_rlhf.py", "ppo_trainer.py"}  # DeepSpeed's, and DeepSpeed-Chat's
    assert set(re.findall(r"`(\w+\.py)`", PAGES[name])) <= files


def test_the_drawings_of_the_code():
    folders = {path.parent for path in (ROOT / "zeropp_fp8").rglob("*.py")} - {ROOT / "zeropp_fp8"}
    named = re.findall(r"^(zeropp_fp8/\w+)/ ", README, flags=re.M)
    assert {ROOT / name for name in named} == {path for path in folders if path.parent == ROOT / "zeropp_fp8"}
    for below in re.findall(r"(?<!\S)(\w+)/(?= |$)", re.search(r"^zeropp_fp8/zero/ .*", README, flags=re.M).group()):
        assert ROOT / "zeropp_fp8/zero" / below in folders
    (drawing,) = (body for body in blocks(PAGES["docs/architecture.md"]) if body.startswith("plugin "))
    top = re.findall(r"^(\w+)", drawing, flags=re.M)
    assert {ROOT / "zeropp_fp8" / name for name in top} == {p for p in folders if p.parent == ROOT / "zeropp_fp8"}
    inside = re.findall(r"^  (\w+)", drawing, flags=re.M)
    assert {ROOT / "zeropp_fp8/zero" / n for n in inside} == {
        p for p in folders if p.parent == ROOT / "zeropp_fp8/zero"
    }


# -- JSON


def test_the_ds_config_shown_is_the_recipe_file():
    (shown,) = map(json.loads, blocks(README, "json"))
    assert shown == json.loads((ROOT / "ds_configs/zeropp.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_file_and_a_line(recipe):
    config = json.loads((ROOT / f"ds_configs/{recipe}.json").read_text())
    assert resolve(config).recipe == recipe == config[SECTION]["recipe"]
    assert f"| `{recipe}` |" in README and f"| `{recipe}` |" in PAGES["docs/recipes.md"]


@pytest.mark.parametrize("block", of_all_pages(lambda text: blocks(text, "json")))
def test_every_json_is_one_that_works(block):
    shown = json.loads(block)
    if SECTION in shown:
        assert resolve(STAGE_3 | shown) is not None
    elif set(shown) <= set(RECIPES):
        assert shown == {name: filled for name, filled in RECIPES.items() if filled}, "run `make docs`"
    else:
        from deepspeed.monitor.config import get_monitor_config

        assert set(shown) == {"tensorboard"} and get_monitor_config(shown).tensorboard.enabled


def fragments(text):
    """Return what stands in backticks as a part of a JSON object, `"key": value`, with a value that is written out."""
    return [span for span in spans(text) if re.match(r'"\w+": ', span) and "..." not in span and ".." not in span]


@pytest.mark.parametrize("fragment", of_all_pages(fragments))
def test_every_fragment_of_json_is_one_that_works(fragment):
    """A field with its value: of the section, of one of its parts, or a key of DeepSpeed's."""
    shown = json.loads(f"{{{fragment}}}")
    if SECTION in shown:
        assert resolve(STAGE_3 | shown) is not None
        return
    models = [PluginConfig, *(f.annotation for f in PluginConfig.model_fields.values() if is_part(f))]
    fit = [model for model in models if set(shown) <= set(model.model_fields)]
    if fit and not any("load_universal" in str(value) for value in shown.values()):
        assert any(accepts(model, shown) for model in fit)
    else:
        (value,) = shown.values()
        assert shown in OF_DEEPSPEED or value in OF_DEEPSPEED, fragment


def is_part(field):
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def accepts(model, shown):
    try:
        return bool(model(**shown))
    except ValueError:
        return False


def test_the_configuration_page_is_what_the_models_say():
    assert PAGES["docs/configuration.md"] == page(), "run `make docs`"


def test_every_field_says_what_it_means():
    parts = [field.annotation for field in PluginConfig.model_fields.values() if is_part(field)]
    assert all(part.__doc__ for part in parts) and len(parts) == 12
    for model in (PluginConfig, *parts):
        for name, field in model.model_fields.items():
            assert is_part(field) or (field.description and "|" not in field.description), (model, name)


def test_the_page_says_other_things_of_other_models(monkeypatch):
    class Other(PluginConfig):
        enabled: bool = Field(True, description="another meaning")

    monkeypatch.setattr(configuration, "PluginConfig", Other)
    said = PluginConfig.model_fields["enabled"].description
    assert page() == PAGES["docs/configuration.md"].replace(said, "another meaning"), "run `make docs`"


# -- Python


@pytest.mark.parametrize("block", of_all_pages(lambda text: blocks(text, "python")))
def test_the_python_shown_runs(block):
    """Names of the package are there and imports are executed; test_rlhf_docs.py runs what docs/rlhf.md defines."""
    tree = ast.parse(block)
    names = re.findall(r"zeropp_fp8\.(\w+)\(", block)
    assert all(callable(getattr(zeropp_fp8, name)) for name in names)
    imports = [line for line in block.splitlines() if re.match("from (zeropp_fp8|quantize)", line)]
    defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert names or imports or defined
    for line in imports:
        exec(line, {})  # raises ImportError


@EACH_PAGE
def test_names_of_the_package_are_there(name):
    for dotted in re.findall(r"`zeropp_fp8\.([\w.]+)", prose(PAGES[name])):
        first, *others = dotted.split(".")
        found = getattr(zeropp_fp8, first, None)
        if first in PluginConfig.model_fields:  # a key of the section
            continue
        if found is None:
            found = importlib.import_module(f"zeropp_fp8.{first}")
        for end, other in enumerate(others, 1):  # a module is there as an attribute once something has imported it
            module = ".".join(["zeropp_fp8", first, *others[:end]])
            found = getattr(found, other, None) or importlib.import_module(module)


def shown_of_the_api():
    """Each name that docs/api.md shows, with its dots."""
    for dotted, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", PAGES["docs/api.md"], flags=re.M):
        members = re.search(r"members: \[(.*)\]", options)
        yield from (f"{dotted}.{name}" for name in members[1].split(", ")) if members else [dotted]


def test_the_api_page_shows_what_is_public():
    """All that modules for scripts export; each name is there and has a docstring."""
    # This function's file has its name, and a reader of files finds that first.
    shown = {name.replace("extra_state.extra_state", "extra_state") for name in shown_of_the_api()}
    for dotted in shown:
        assert pydoc.locate(dotted).__doc__, dotted
    modules = ("zeropp_fp8", "zeropp_fp8.fsdp2", "zeropp_fp8.handover", "zeropp_fp8.receiving", "zeropp_fp8.compute")
    exported = {f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__}
    assert exported - {"zeropp_fp8.__version__"} <= shown


# -- commands

PROGRAMS = r"(?:make|pip|python|pytest|deepspeed|torchrun|accelerate|zeropp-fp8)"


def commands(text):
    """Every command, from blocks and from running text, as one line without comments."""
    lines = "\n".join(blocks(text)).replace("\\\n", " ").splitlines()
    found = [re.sub(r"\s+#.*", "", line) for line in lines if re.match(rf"(?:[A-Z_]+=\S+ )*{PROGRAMS} ", line)]
    found += [f"python -m {span}" for span in spans(text) if re.match(r"benchmarks\.\w+\b", span)]
    found += [span for span in spans(text) if re.match(rf"{PROGRAMS} [a-z.]", span)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", of_all_pages(commands))
def test_every_command_is_one(command):
    words = shlex.split(command)
    while "=" in words[0]:
        variable = words.pop(0).partition("=")[0]
        own = {"ZEROPP_FP8_AUTOLOAD", "ZEROPP_FP8_RECIPE"}
        assert variable in own | {
            "DS_ACCELERATOR",
            "OMP_NUM_THREADS",
            "LOCAL_SIZE",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        }
    program, *given = words
    if program == "zeropp-fp8":
        given = ["-m", "zeropp_fp8", *given]
    {"make": check_make, "pip": check_pip, "pytest": check_pytest}.get(program, check_script)(given)


def test_there_are_commands():
    assert sum(len(commands(text)) for text in PAGES.values()) > 40


def check_make(given):
    makefile = (ROOT / "Makefile").read_text()
    for word in given:
        variable, named, _ = word.partition("=")
        assert re.search(rf"^{variable} \?=" if named else rf"^{word}:", makefile, flags=re.M), word


def check_pip(given):
    """Of the package, with one of its extras."""
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", given[-1])
    extras = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().split("[options.extras_require]")[1], flags=re.M)
    assert given[:-1] == ["install"] and extra and extra[1] in (None, *extras)


def check_pytest(given):
    path, *options = given
    text = (ROOT / path).read_text()
    if "-k" in options:
        for word in options[options.index("-k") + 1].split(" or "):
            assert re.search(rf"def test_\w*{word}", text), word
    assert {word for word in options if word.startswith("-")} <= {"-k", "-s"}


def check_script(given):
    """The script or module is there, and it knows the options."""
    if any(word.startswith("examples/integrations/") for word in given):  # run in test_integrations.py
        return
    if given[0] == "launch":
        given = given[1:]
    elif given[0] == "--nproc-per-node":  # of torchrun
        given = given[2:]
    if given[0] in ("-m", "--module"):
        module, *rest = given[1:]
        assert importlib.util.find_spec(module), module
        if module == "zeropp_fp8.run":
            assert rest[0] == "train.py"  # the user's own
        elif module == "zeropp_fp8" and rest[0] in COMMANDS:
            assert importlib.import_module(COMMANDS[rest[0]][0]).parse(rest[1:])
        elif module == "benchmarks.plan_fit.rlhf":
            assert importlib.import_module(module).parse(rest)
        else:
            found = Path(importlib.util.find_spec(module).origin)
            check_options(found.with_name("__main__.py") if found.name == "__init__.py" else found, rest)
    elif given[0] != "train.py":
        assert (ROOT / given[0]).is_file(), given[0]
        if not given[0].startswith("examples/rlhf/"):  # read in test_rlhf_docs.py
            check_options(ROOT / given[0], given[1:])


def check_options(script, given):
    """Options stand in the script's own source, or in what it imports from its neighbours; so do subcommands."""
    source = script.read_text()
    imported = re.findall(r"^(?:import|from) ([\w.]+)", source, flags=re.M)
    neighbours = [script.parent / f"{name}.py" for name in imported]
    neighbours += [ROOT / f"{name.replace('.', '/')}.py" for name in imported if name.startswith("benchmarks.")]
    sources = source + "".join(path.read_text() for path in neighbours if path.is_file())
    for word in given:
        if word.startswith("--"):
            assert f'"{word}"' in sources or f"'{word}'" in sources, word
    if given and re.fullmatch("[a-z]+", given[0]):
        assert f'"{given[0]}"' in sources, given[0]


def test_rlhf_commands_are_on_the_page_that_is_tested():
    for name, text in PAGES.items():
        is_run = name in ("docs/rlhf.md", "docs/integrations.md")
        assert is_run or not any("examples/rlhf/" in command for command in commands(text)), name


def test_wrong_commands_are_found():
    for wrong in ("make coffee", "python -m benchmarks.kernels --no-such", "python -m zeropp_fp8.no_such", "pip list"):
        program, *given = shlex.split(wrong)
        check = {"make": check_make, "pip": check_pip}.get(program, check_script)
        with pytest.raises(AssertionError):
            check(given)


@EACH_PAGE
def test_make_targets_named_exist(name):
    for target in re.findall(r"`make\s+([\w-]+)", PAGES[name]):
        check_make([target])


# -- figures


def tables(text):
    """name -> rows of cells, of what benchmarks.report makes."""
    found = re.findall(r"<!-- block: (\w+) -->\n(.*?)<!-- end -->", text, flags=re.S)
    rows = {name: [line for line in body.splitlines() if line.startswith("|")] for name, body in found}
    return {name: [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[name]] for name in rows}


RESULT_PAGES = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/results"))
SHOWN = tables(RESULT_PAGES)


def test_every_table_of_results_is_made_of_its_files():
    outside = re.sub(r"<!-- block: .*?<!-- end -->", "", RESULT_PAGES, flags=re.S)
    assert not re.search(r"^\|", outside, flags=re.M)
    assert RESULT_PAGES.count("<!-- block: ") == RESULT_PAGES.count("<!-- end -->") == len(SHOWN) > 25


def numbers(cells):
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", " ".join(cells).replace(",", ""))]


@pytest.mark.parametrize("page_name, cells", [("README.md", 32), ("docs/results.md", 50)])
def test_step_times_are_those_of_the_files(page_name, cells):
    """Eager ones, and in brackets compiled ones."""
    runs = {
        "stock ZeRO-3, decoder layers as z3 leaf modules": "stock-leaf",
        "DeepSpeed's ZeRO++, decoder layers as z3 leaf modules": "in-tree-leaf",
        "FSDP2": "fsdp2",
        "HSDP (FSDP2, a full copy in each node)": "hsdp",
        "lossless": "lossless",
        "zeropp-exact": "zeropp-exact",
        "zeropp": "zeropp-difference",
        "zeropp with all codes in each step": "zeropp",
        "zeropp-4bit": "zeropp-4bit",
        "fp8-lm-zeropp": "fp8-lm-zeropp-difference",
        "fp8-lm-zeropp with all codes in each step": "fp8-lm-zeropp",
        "fp8-lm": "fp8-lm",
    }
    measured = {}
    for file in ("25_10gbit", "25_10gbit-compiled", "nvlink-again"):
        for row in json.loads((RESULTS / f"two_nodes/h200-4-{file}.json").read_text())["rows"]:
            measured[row["run"], str(row["gbit"])] = round(row["step_ms"])
    rows = re.findall(r"^\|(.*)\|$", PAGES[page_name], flags=re.M)
    head = next(n for n, row in enumerate(rows) if "25 Gbit/s | 10 Gbit/s | one node" in row)
    seen = 0
    for row in rows[head + 2 :]:
        label, *times = (cell.strip() for cell in row.split("|"))
        run = runs.get(re.sub(r"\*\*|`", "", label.partition(":")[0]))
        if run is None:
            break
        for rate, cell in zip(("25.0", "10.0", "nvlink"), times):
            of_rate = run.removesuffix("-difference") if rate == "nvlink" else run  # in one node nothing differs
            found = [measured.get((of_rate + suffix, rate)) for suffix in ("", "-compiled")]
            assert numbers([cell]) == [ms for ms in found if ms is not None], (label, rate)
            seen += len(numbers([cell]))
    assert seen == cells


def test_the_demo_shown_is_the_one_kept():
    summary = json.loads((RESULTS / "demo/cpu-4-gloo.json").read_text())["runs"]
    (output,) = (body for body in blocks(README) if "held-out" in body)
    for name, run in summary.items():
        ratios = [run[f"{link}_bytes"] / summary["stock"][f"{link}_bytes"] for link in ("inter", "intra")]
        kept = [run["loss_start"], run["loss_end"], run["held_out_loss"], run["step_s"]]
        kept += [run["inter_bytes"] / 1e6, ratios[0], run["intra_bytes"] / 1e6, ratios[1]]
        in_readme = [float(each) for each in re.search(rf"^{name} +(.*)$", output, flags=re.M)[1].split()]
        (row,) = (row for row in SHOWN["demo"] if row[0].strip("`") == name)
        for shown in (in_readme, numbers(row[1:])):
            assert shown == pytest.approx(kept, abs=6e-4), name
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    for kept, page_name in ((picture, "README.md"), ("benchmarks/results/demo/cpu-4-gloo.png", "docs/results.md")):
        assert kept in PAGES[page_name] and (ROOT / kept).stat().st_size > 10_000
    assert picture.removeprefix("benchmarks/results/").removesuffix(".png") in pictures.KEPT


# -- messages


def messages():
    """All texts of the package, joined; what is filled in stands as three dots."""
    texts = []
    for path in (ROOT / "zeropp_fp8_autoload.py", *(ROOT / "zeropp_fp8").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


MESSAGES = messages()
SYMPTOMS = [
    span
    for row in re.findall(r"^\| (.*?) \| ", PAGES["docs/troubleshooting.md"], flags=re.M)
    for span in re.findall(r"`([^`]+)`", row)
    if " " in span and not span.startswith("python ")
]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_messages_quoted_are_those_of_the_package(symptom):
    """Piece by piece: dots stand for what a message fills in, and the section's name is filled in."""
    for piece in re.split(r'\.\.\.|"?zeropp_fp8"?', symptom):
        assert piece.strip(' "') in MESSAGES, piece


def test_there_are_messages():
    assert len(SYMPTOMS) > 40
