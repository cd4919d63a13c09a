"""``serve`` refuses early with the right exit status, takes the port, then starts the server."""

import argparse
import logging
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.main import COMMANDS, Command, dispatch
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[3]
PEM = ROOT / "tests/helpers/fixtures/localhost.pem"
TINY = str(ROOT / "benchmarks" / "lingbot_world" / "configs" / "cpu_tiny.yaml")


@pytest.fixture(autouse=True)
def _no_setting_of_this_machine(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
                 "VLLM_OMNI_LINGBOT_ACTION_ROOT", "VLLM_API_KEY"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """The command configures the log of its process, which here is that of all tests."""
    package = logging.getLogger("vllm_omni")
    before = package.handlers[:], package.level, package.propagate
    yield
    package.handlers[:], package.propagate = before[0], before[2]
    package.setLevel(before[1])


@pytest.fixture
def model(tmp_path):
    return str(write_fake_checkpoint(tmp_path / "model"))


@pytest.fixture
def started(monkeypatch):
    """Calls of the server, which is replaced by a recorder that ends with status 7."""
    calls = []

    def run_server(resolved, *, server, listener):
        calls.append((resolved, server, listener.getsockname()[1]))
        return 7

    module = ModuleType(serve._SERVER_MODULE)
    module.run_server = run_server
    monkeypatch.setitem(sys.modules, serve._SERVER_MODULE, module)
    monkeypatch.setitem(COMMANDS, "serve", Command(serve.__name__, "serve", shared_with_vllm=True))
    monkeypatch.setattr(serve, "detect_platform", lambda: "cpu")
    return calls


def run(*line):
    return dispatch(["serve", "--omni", *line])


def test_a_complete_line_reaches_the_server(model, started, capsys):
    status = run(
        model, "--deploy-config", TINY, "--port", "0", "--host", "127.0.0.1", "--max-num-seqs", "2",
        "--served-model-name", "world", "other", "--api-key", "secret", "--no-web-page",
    )  # fmt: skip
    assert status == 7
    ((resolved, server, port),) = started
    assert (resolved.config.max_num_seqs, resolved.config.model) == (2, model)
    assert resolved.config.executor == "mp"
    assert server == ServerConfig(
        served_model_names=("world", "other"), host="127.0.0.1", port=0, api_keys=("secret",),
        web_page=False,
    )  # fmt: skip
    assert port > 0
    log = capsys.readouterr().err
    assert log.count("max_num_seqs = 2 (command line)") == 1
    assert log.count(f"dtype = float32 (deploy file {TINY})") == 1
    assert "non-default args: " in log
    assert "secret" not in log


@pytest.mark.parametrize(
    ("line", "keys"),
    [([], ("from-environment",)), (["--api-key", "typed", "other"], ("typed", "other"))],
    ids=["not typed", "typed"],
)
def test_a_key_in_the_environment_counts_where_none_is_typed(
    model, started, monkeypatch, capsys, line, keys
):
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert run(model, "--port", "0", *line) == 7
    assert started[0][1].api_keys == keys
    log = capsys.readouterr().err
    assert ("VLLM_API_KEY" in log) == (not line)
    assert not any(key in log for key in ("from-environment", *keys))


def test_an_empty_key_in_the_environment_is_none(model, started, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert run(model, "--port", "0") == 7
    assert started[0][1].api_keys == ()


@pytest.mark.parametrize(
    "stage",
    ['{"env": {"HF_TOKEN": "hf_secret"}}', '{"runtime": {"env": {"HF_TOKEN": "hf_secret"}}}',
     '{"engine_args": {"env": {"HF_TOKEN": "hf_secret"}}}'],
)  # fmt: skip
def test_the_environment_of_the_workers_is_logged_by_name_alone(model, started, capsys, stage):
    assert run(model, "--port", "0", "--stage-overrides", f'{{"0": {stage}}}') == 7
    assert started[0][0].config.env == {"HF_TOKEN": "hf_secret"}
    log = capsys.readouterr().err
    assert "env.HF_TOKEN = *** (stage override)" in log
    assert "'env': {'HF_TOKEN': '***'}" in log
    assert "hf_secret" not in log


def test_a_misplaced_secret_is_not_logged_either(model, started, capsys):
    overrides = '{"0": {"env": "HF_TOKEN=hf_secret"}}'
    assert run(model, "--port", "0", "--stage-overrides", overrides) == 1
    log = capsys.readouterr().err
    assert "env: must be a mapping of names to values, got ***" in log
    assert "hf_secret" not in log
    assert started == []


def test_without_a_deploy_file_workers_are_processes_and_the_name_is_the_model(model, started):
    assert run("--model", model, "--port", "0") == 7
    ((resolved, server, _),) = started
    assert resolved.config.executor == "mp"
    assert (resolved.streaming_output, resolved.step_execution) == (True, True)
    assert server.served_model_names == (model,)


def test_only_typed_flags_override_the_file(model, started, tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("stages: [{stage_id: 0, max_num_seqs: 5, enforce_eager: true}]")
    assert run(model, "--deploy-config", str(path), "--port", "0", "--device", "cuda") == 7
    assert run(
        model, "--deploy-config", str(path), "--port", "0", "--device", "cuda",
        "--no-enforce-eager", "--stage-overrides", '{"0": {"max_num_seqs": 6}}',
    ) == 7  # fmt: skip
    assert [call[0].config.max_num_seqs for call in started] == [5, 6]
    assert [call[0].config.enforce_eager for call in started] == [True, False]


@pytest.mark.parametrize(
    "words", [["http://a", "http://b"], ['["http://a", "http://b"]']], ids=["words", "json"]
)
def test_allowed_origins(model, started, words):
    assert run(model, "--port", "0", "--allowed-origins", *words) == 7
    assert started[0][1].allowed_origins == ("http://a", "http://b")


@pytest.mark.usefixtures("started")
def test_settings_without_effect_are_named(model, capsys):
    assert run(model, "--port", "0", "--shm-threshold-bytes", "3", "--vae-use-slicing") == 7
    log = capsys.readouterr().err
    assert log.count("shm_threshold_bytes=3 has no effect: ") == 1
    assert log.count("vae_use_slicing=true has no effect: ") == 1


def test_the_log_also_goes_to_a_file(model, started, tmp_path):
    assert run(model, "--port", "0", "--log-file", str(tmp_path / "log")) == 7
    assert "non-default args" in (tmp_path / "log").read_text()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the deploy config is not a model source"),
        ("--model=", "the deploy config is not a model source"),
        ("MODEL --model other", "but --model is 'other'"),
        ("MODEL --deploy-config missing.yaml", "Deploy config not found: missing.yaml"),
        ("/no/such/model", "'/no/such/model' is not a directory"),
        ("MODEL --headless", "--headless=true is refused"),
        ("MODEL --api-server-count 2", "--api-server-count=2 is refused"),
        ("MODEL --api-server-count 0", "--api-server-count=0 is refused"),
        ("MODEL --stage-id 0", "--stage-id=0 is refused"),
        ("MODEL --omni-replica-address x", '--omni-replica-address="x" is refused'),
        ("MODEL --omni-dp-size-local 0", "--omni-dp-size-local: must be at least 1"),
        ("MODEL --omni-heartbeat-timeout 0", "--omni-heartbeat-timeout: must be above 0"),
        ("MODEL --lora-backend distill", '--lora-backend="distill" is refused'),
        ("MODEL --data-parallel-size 2", "--data-parallel-size=2 is refused"),
        ("MODEL --data-parallel-address x", '--data-parallel-address="x" is refused'),
        (
            "MODEL --enable-expert-parallel",
            "command line: --enable-expert-parallel=true is refused",
        ),
        ("MODEL --enable-cpu-offload", "--enable-cpu-offload=true is refused"),
        ("MODEL --ring 2", "--ring=2 is refused"),
        ("MODEL --usp 3", "4 attention heads cannot be split"),
        ("MODEL --max-num-seqs 0", "--max-num-seqs: must be at least 1, got 0"),
        ("MODEL --stage-overrides 3", "--stage-overrides: must look like"),
        ('MODEL --stage-overrides {"1":{}}', "unknown stage '1'"),
        ("MODEL --strategy-config x", '--strategy-config="x" is refused'),
        ("MODEL --port 70000", "--port: must be at most 65535, got 70000"),
        ("MODEL --log-file /no/such/dir/log", "'/no/such/dir/log': No such file or directory"),
        ("MODEL --log-file /dev/full", "--log-file: '/dev/full': No space left on device"),
        ("MODEL --log-file /tmp", "--log-file: '/tmp': Is a directory"),
        ("/caf\udce9", "model '/caf\\udce9': its path must be UTF-8; rename it"),
        ("MODEL --allowed-origins [1]", "--allowed-origins: must list texts"),
        ("MODEL --allowed-origins [", "--allowed-origins is not a JSON list"),
        ("MODEL --allowed-methods [1]", "--allowed-methods: must list texts"),
        ("MODEL --root-path worlds", "--root-path: must begin with /"),
        ("MODEL --root-path /worlds/", "--root-path: must begin with /"),
        ("MODEL --uds /no/such/s", "/no/such/s: No such file or directory; choose another --uds"),
        (f"MODEL --uds {'/long' * 30}", "path too long; choose another --uds"),
        ("MODEL --log-config-file /no/such.json", "--log-config-file: must name a file"),
        (f"MODEL --log-config-file {__file__}", f"--log-config-file: '{__file__}': Extra data"),
        ("MODEL --otlp-traces-endpoint grpc://h:4317", "--otlp-traces-endpoint: must be a URL"),
        ("MODEL --ssl-ciphers AES128", "--ssl-ciphers need --ssl-certfile"),
        (f"MODEL --ssl-certfile {PEM} --ssl-ciphers no", "--ssl-ciphers: OpenSSL knows no cipher"),
        ("MODEL --config /no/such.yaml", "--config: '/no/such.yaml': No such file or directory"),
    ],
)
def test_settings_that_are_refused_exit_1_with_one_line(model, started, capsys, line, message):
    assert run(*line.replace("MODEL", model).split()) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm-omni serve: error: ")
    assert message in last
    assert started == []


FILE = """
model: {model}
port: 0
served_model_name: [one, two]
max-num-seqs: 5
max-queued: 3
diffusion-streaming-output: false
no-web-page: true
disable-fastapi-docs: false
hsdp-shard-size: -1
default-sampling-params: {{"0": {{seed: 3}}}}
drain-timeout:
"""


def test_flags_from_a_file_and_those_of_the_line_over_them(model, started, tmp_path):
    (tmp_path / "flags.yaml").write_text(FILE.format(model=model))
    file = str(tmp_path / "flags.yaml")
    assert run("--config", file, "--deploy-config", TINY, "--max-num-seqs", "6") == 7
    ((resolved, server, _),) = started
    assert (resolved.config.model, resolved.config.max_num_seqs) == (model, 6)
    assert (resolved.config.max_queued, resolved.streaming_output) == (3, False)
    assert resolved.default_sampling_params.seed == 3
    assert server == ServerConfig(("one", "two"), port=0, web_page=False)
    other = str(write_fake_checkpoint(tmp_path / "other"))
    assert run(other, "--config", file, "--deploy-config", TINY) == 7
    assert started[1][0].config.model == other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unrecognized arguments: --prot (did you mean --port?)"),
        ("prot: false", "unrecognized arguments: --prot (did you mean --port?)"),
        ("port: x", "argument --port: must be an integer"),
        ("port: true", "argument --port: expected one argument"),
        ("served-model-name: []", "expected at least one argument"),
        ("port: 1\nport: 2", "line 2: key 'port' is given twice"),
        ("[1]", "must be a mapping with names as keys"),
        ("config: other.yaml", "a file cannot name another one"),
    ],
)
def test_a_file_of_flags_that_is_none(model, started, tmp_path, capsys, text, message):
    (tmp_path / "flags.yaml").write_text(text)
    assert run(model, "--config", str(tmp_path / "flags.yaml")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm-omni serve: error: ")
    assert f"{tmp_path}/flags.yaml" in last
    assert message in last
    assert started == []


def test_a_busy_port_is_noticed_before_the_server_starts(model, started, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(model, "--host", "127.0.0.1", "--port", port) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert started == []


def test_two_servers_cannot_take_one_port():
    with serve.open_listener(ServerConfig(("world",), host="127.0.0.1", port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use"):
            serve.open_listener(ServerConfig(("world",), host="127.0.0.1", port=port))


def test_the_port_is_free_again_when_the_server_ends(model, started):
    assert run(model, "--host", "127.0.0.1", "--port", "0") == 7
    with serve.open_listener(ServerConfig(("world",), host="127.0.0.1", port=started[0][2])):
        pass


def test_usage_errors_exit_2(model, started):
    with pytest.raises(SystemExit) as stop:
        run(model, "--stage-overrides", "{")
    assert stop.value.code == 2
    assert started == []


def test_help_loads_no_torch_and_is_quick():
    code = (
        "import argparse, sys; from vllm_omni.entrypoints.cli import serve; "
        "parser = argparse.ArgumentParser(); serve.add_arguments(parser); parser.format_help(); "
        "import time; print(int('torch' in sys.modules), time.process_time())"
    )
    began = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, cpu_s = run.stdout.split()
    assert loaded == "0"
    assert float(cpu_s) < 1.0, f"{time.perf_counter() - began:.2f} s of wall clock"


def test_the_parser_needs_nothing_but_argparse():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert vars(parser.parse_args(["m", "--port", "1"])) == {
        "serve.model_tag": "m", "server.port": 1,
    }  # fmt: skip
