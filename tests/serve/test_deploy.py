"""The files of deploy/ fit the service and each other, and the alerts go off when they should."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from sfumato.cli import app
from sfumato.serve.monitoring import Metrics
from sfumato.serve.server import IDLE
from sfumato.serve.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "guides" / "operate.md").read_text(encoding="utf-8")
read = lambda name: (DEPLOY / name).read_text(encoding="utf-8")
rules = lambda: [rule for group in yaml.safe_load(read("alerts.yml"))["groups"] for rule in group["rules"]]


def queries():
    panels = json.loads(read("dashboard.json"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules()]


def test_alerts_and_dashboard_ask_for_metrics_that_there_are_and_every_alert_is_explained():
    known, registry = {}, Metrics().registry  # Name -> labels.
    for metric in registry._names_to_collectors.values():
        for name in registry._get_names(metric):
            known[name] = {*metric._labelnames, *(["le"] if name.endswith("_bucket") else [])}
    asked = {name for expr in queries() for name in re.findall(r"\bsfumato_\w+", expr)}
    assert asked <= set(known) and len(asked) > 12, asked - set(known)
    for expr in queries():
        for name, selector in re.findall(r"\b(sfumato_\w+)\{([^}]*)\}", expr):
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= known[name], expr
        labels = {label for part in re.findall(r"by \(([^)]*)\)", expr) for label in part.split(", ")}
        assert labels <= set().union(*(known[name] for name in re.findall(r"\bsfumato_\w+", expr))), expr
    others = set().union(*(re.findall(r"\b(?:up|ALERTS)\b", expr) for expr in queries()))
    assert others == {"up", "ALERTS"}  # Prometheus has them itself.
    explained = re.findall(r"^\| `(Sfumato\w+)` \|", GUIDE, re.MULTILINE)
    assert sorted(explained) == sorted(rule["alert"] for rule in rules())
    for name in sorted(path.name for path in DEPLOY.iterdir() if path.suffix in (".yml", ".yaml", ".conf", ".json")):
        assert f"`{name}`" in GUIDE or name.startswith("grafana-"), name


def test_compose_and_proxy_fit_the_service_with_no_more_rights_than_it_needs():
    compose = yaml.safe_load(read("compose.yaml"))
    services, made = compose["services"], {"./index", "${PHOTOS", "./keys.txt", "./metrics_key.txt"}
    mounted = [volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ())]
    mounted += [secret["file"] for secret in compose["secrets"].values()]
    for place in set(mounted) - set(compose["volumes"]) - made:
        assert (DEPLOY / place).is_file(), place
    for one in services.values():
        assert set(one.get("depends_on", ())) <= set(services)
        assert set(one.get("secrets", ())) <= set(compose["secrets"])
    addresses = {f"{n}:{services[n]['networks']['default']['ipv4_address']}" for n in ("serve-1", "serve-2")}
    assert set(services["proxy"]["extra_hosts"]) == addresses
    upstreams = re.findall(r"server (serve-\d:\d+) ", read("nginx.conf"))
    (job,) = yaml.safe_load(read("prometheus.yml"))["scrape_configs"]
    assert upstreams == job["static_configs"][0]["targets"] == ["serve-1:8000", "serve-2:8000"]
    assert all(f'job="{job["job_name"]}"' in expr for expr in queries() if re.search(r"\bup\{", expr))
    service = services["serve-1"]
    name, _, *options = service["command"]
    known = {flag for parameter in typer.main.get_command(app).commands[name].params for flag in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known
    assert Settings().drain + Settings().grace < float(service["stop_grace_period"].removesuffix("s"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = service["build"]["args"]["EXTRAS"].split(",")
    assert set(wanted) <= set(extras) and "pgvector" in wanted
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "\nUSER 10001:10001\n" in image and "\nHEALTHCHECK " in image
    for service in (services["serve-1"], services["serve-2"]):
        assert service["read_only"] is True and service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"user", "healthcheck", "cap_add", "privileged"} & service.keys()  # they would replace the image's
    text, usual = read("nginx.conf"), Settings()
    (size,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert usual.max_body_bytes <= int(size) * 2**20 < 1.2 * usual.max_body_bytes
    (patience,) = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert int(patience) > 2 * usual.timeout
    (idle,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(idle) < IDLE
    left_out = {int(seconds) for seconds in re.findall(r"fail_timeout=(\d+)s", text)}
    assert max(left_out) + 2 < usual.drain  # nginx counts whole seconds.


FIRST, JUDGED = 'sfumato_first_hit_probability_{}{{gallery="images",target="listed"}}', "sfumato_judged_{}_total{{{}}}"
COUNT, SUM, DRAWN = FIRST.format("count"), FIRST.format("sum"), 'drawn="yes",target="fits"'
SEARCH = 'route="/v1/search"'
CONSTANT = {
    "sfumato_ready": (0, 1), 'up{job="sfumato",instance="a"}': (0, 1), 'sfumato_store_up{gallery="images"}': (0, 1),
    'sfumato_calibrated_probability{gallery="images"}': (0.8, 0.8),
}  # fmt: skip
"""Values of gauges: (when all alerts go off, when none does)."""

GROWING = {
    f'sfumato_requests_total{{{SEARCH},status="500"}}': (10, 1),
    f'sfumato_requests_total{{{SEARCH},status="200"}}': (300, 300),
    'sfumato_requests_total{route="/readyz",status="503"}': (0, 100),
    f'sfumato_request_seconds_bucket{{{SEARCH},le="2.0"}}': (280, 290),
    f'sfumato_request_seconds_bucket{{{SEARCH},le="5.0"}}': (300, 300),
    f'sfumato_request_seconds_bucket{{{SEARCH},le="+Inf"}}': (300, 300), COUNT: (10, 10),
    JUDGED.format("hits", DRAWN): (1, 1), JUDGED.format("probability", DRAWN): (0.8, 0.8),
    JUDGED.format("right", DRAWN): (0.5, 0.7),
}  # fmt: skip
"""What counters grow by in each interval, likewise."""


def gone_off(good, tmp_path, few=1):
    """The alerts that go off after a week: of five minutes an interval, and for what looks at minutes of one second."""
    alerts = {rule["alert"]: "[6h]" in rule["expr"] or "[30d]" in rule["expr"] for rule in rules()}
    n, last, tests = 2100, 72, []
    for long in (False, True):
        series = {name: f"{values[good]}x{n}" for name, values in CONSTANT.items()}
        series |= {name: f"0+{values[good] * (few if name == COUNT else 1)}x{n}" for name, values in GROWING.items()}
        before, after = 8 * few, (4, 7.5)[good] * few
        series[SUM] = f"0+{before}x{n - last} {before * (n - last) + after}+{after}x{last - 1}"
        interval, end = ("5m", "174h50m") if long else ("1s", "2090s")
        asked = [f'count(ALERTS{{alertname="{name}",alertstate="firing"}})' for name in alerts if alerts[name] is long]
        tests.append({
            "interval": interval,
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": expr, "eval_time": end, "exp_samples": []} for expr in asked],
        })  # fmt: skip
    file = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "15m", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(file), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout + done.stderr
    found = set(re.findall(r'alertname=\\"(\w+)\\"[^\n]*\n[^\n]*\n\s*got: {}', said))
    assert (done.returncode == 0) == (not found), said
    return found


@pytest.mark.engine
def test_alerts_go_off_when_they_should_and_not_otherwise(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    for kind, *options in (("config", "--syntax-only", "prometheus.yml"), ("rules", "alerts.yml")):
        subprocess.run(["promtool", "check", kind, *options], cwd=DEPLOY, check=True, capture_output=True)
    assert gone_off(False, tmp_path) == {rule["alert"] for rule in rules()} and gone_off(True, tmp_path) == set()
    few = gone_off(False, tmp_path, few=0.1)
    assert few and not {"SfumatoProbabilitiesMoved", "SfumatoProbabilitiesUnlikeCalibration"} & few
