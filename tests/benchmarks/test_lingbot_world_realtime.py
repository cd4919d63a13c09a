"""The live benchmark against scripted sockets, and its command line."""

import asyncio
import itertools
import json
import statistics

import pytest

from tests.helpers.scripted_server import Peer, scripted_server
from vllm_omni.benchmarks import realtime as benchmark
from vllm_omni.benchmarks import report, workload
from vllm_omni.benchmarks.realtime import arrival_offsets, parse_args, run_sessions
from vllm_omni.benchmarks.session import (
    BenchmarkError,
    SessionOptions,
    endpoint_url,
    run_session,
)
from vllm_omni.benchmarks.workload import (
    PromptUpdate,
    Workload,
    load_workload,
)
from vllm_omni.diffusion.geometry import chunk_pixel_frames

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu, pytest.mark.timing]


def rollout(num_chunks: int, **fields: object) -> Workload:
    """A small workload with a picture that needs no drawing."""
    return load_workload(None, {"num_chunks": num_chunks, "image": "https://host/a.png", **fields})


class TestFlags:
    @pytest.mark.parametrize(
        ("base", "url"),
        [
            (None, "ws://127.0.0.1:8000/v1/realtime/video"),
            ("http://h:1", "ws://h:1/v1/realtime/video"),
            ("https://h/proxy/", "wss://h/proxy/v1/realtime/video"),
            ("ws://h/v1/realtime/video", "ws://h/v1/realtime/video"),
            ("h:9", "ws://h:9/v1/realtime/video"),
        ],
    )
    def test_endpoint(self, base, url):
        assert endpoint_url(base) == url

    def test_other_schemes_are_refused(self):
        with pytest.raises(ValueError, match="ftp"):
            endpoint_url("ftp://h")

    @pytest.mark.parametrize(
        "flags",
        ["--sessions 0", "--warmup-sessions -1", "--warmup-chunks -1", "--num-chunks 0",
         "--playback-buffer-chunks 0", "--target-fps 0", "--concurrency 0", "--arrival-rate 0",
         "--camera-pattern spin"],
    )  # fmt: skip
    def test_senseless_flags_exit_with_two(self, flags, capsys):
        with pytest.raises(SystemExit) as caught:
            parse_args(flags.split())
        assert caught.value.code == 2
        assert flags.split()[0] in capsys.readouterr().err

    def test_defaults(self):
        args = parse_args([])
        assert (args.host, args.port, args.sessions, args.warmup_sessions) == (
            "127.0.0.1", 8000, 1, 0,
        )  # fmt: skip
        assert (args.first_chunk_timeout, args.chunk_timeout, args.ping_interval) == (900, 300, 20)
        assert (args.warmup_chunks, args.playback_buffer_chunks) == (6, 1)
        assert parse_args(["--concurrency", "3"]).sessions == 3

    def test_the_target_rate_does_not_change_the_video(self):
        args = parse_args(["--target-fps", "12", "--fps", "24"])
        made = benchmark._workload(args)
        assert made.fps == 24
        assert benchmark._basis(args, made).fps == 12

    def test_arrivals(self):
        assert arrival_offsets(3, 2.0, process="uniform", seed=1) == [0.0, 0.5, 1.0]
        poisson = arrival_offsets(4000, 2.0, process="poisson", seed=1)
        assert poisson == arrival_offsets(4000, 2.0, process="poisson", seed=1)
        assert poisson != arrival_offsets(4000, 2.0, process="poisson", seed=2)
        gaps = [b - a for a, b in itertools.pairwise(poisson)]
        # Mean and deviation of an exponential gap are both 0.5; 4 standard errors of 4000 draws.
        assert statistics.fmean(gaps) == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
        assert statistics.stdev(gaps) == pytest.approx(0.5, abs=0.05)

    def test_few_intervals_are_warned_about(self):
        assert "whole rollout" in report.warnings(rollout(4), 0, 6)[0]
        assert "only 10 steady intervals" in report.warnings(rollout(16), 10, 6)[0]
        assert report.warnings(rollout(64), 58, 6) == []


async def play(script, workload_: Workload, options: SessionOptions | None = None):
    """Run one session against a script; the result and what the server saw."""
    async with scripted_server(script) as server:
        result = await run_session(server.url, workload_, options or SessionOptions())
        return result, server.peers[0]


class TestSocket:
    async def test_records_and_trailer(self):
        async def script(peer: Peer):
            await peer.video_start()
            await peer.chunk(0, 9, b"first")
            await asyncio.sleep(0.05)
            await peer.chunk(1, 12, b"second!")
            await peer.payload(b"end", kind="trailer", num_frames=0, generation_chunk_index=None)
            await peer.done()

        result, peer = await play(script, rollout(2, seed=7))
        assert peer.start["num_frames"] == 21
        assert peer.start["seed"] == 7
        assert result.request_id == "video_stream-1"
        assert result.video == b"firstsecond!end"
        assert [(c.index, c.byte_length, c.num_frames) for c in result.chunks] == [
            (0, 5, 9), (1, 7, 12),
        ]  # fmt: skip
        first, second = result.chunks
        assert first.inter_arrival_ms is None
        # The pause is the sender's; a busy machine may deliver the first chunk late.
        assert second.inter_arrival_ms > 0
        assert second.arrival_s == pytest.approx(first.arrival_s + second.inter_arrival_ms / 1000)
        assert 0 < result.video_start_s <= first.arrival_s <= result.wall_seconds

    @pytest.mark.parametrize(
        ("steps", "words"),
        [
            ("start", "ended without a chunk"),
            ("start 0", "ended after 1 of 3 chunks"),
            ("start 0 2", "not contiguous: 2 after 0"),
            ("start 0 1 2 3", "more chunks than the 3"),
            ("start 0 stopped", "stopped the session after 1 chunks"),
            ("start 0 error", "no memory .asked for 3 chunks, 33 frames"),
            ("start 0 close", "closed before session.done"),
            ("start 0 binary", "without metadata"),
            ("start 0 short", "99 bytes announced, 5 came"),
            ("start 0 text", "is not valid JSON"),
        ],
    )
    async def test_anything_but_the_whole_rollout_is_a_failure(self, steps, words):
        async def script(peer: Peer):
            acts = {
                "start": peer.video_start,
                "stopped": lambda: peer.done(stopped=True),
                "error": lambda: peer.tell("error", message="no memory", code="out_of_memory"),
                "binary": lambda: peer.socket.send(b"stray"),
                "short": lambda: peer.payload(b"video", byte_length=99, generation_chunk_index=1),
                "text": lambda: peer.socket.send("hello"),
                "close": lambda: peer.socket.close(1011),
            }
            for step in steps.split():
                await (peer.chunk(int(step)) if step.isdigit() else acts[step]())
            await peer.done()

        with pytest.raises(BenchmarkError, match=words):
            await play(script, rollout(3))

    async def test_a_stall_times_out(self):
        async def script(peer: Peer):
            await peer.video_start()
            await peer.chunk(0)
            await peer.socket.wait_closed()

        with pytest.raises(BenchmarkError, match=r"no chunk 1 within 0\.1 s"):
            await play(script, rollout(2), SessionOptions(chunk_timeout_s=0.1))

    async def test_a_missing_first_chunk_times_out_in_spite_of_answers(self):
        async def script(peer: Peer):
            await peer.video_start()
            while True:
                await peer.until("session.ping")
                await peer.tell("session.pong")
                await asyncio.sleep(0.01)

        options = SessionOptions(first_chunk_timeout_s=0.2, ping_interval_s=0.02)
        with pytest.raises(BenchmarkError, match=r"no chunk 0 within 0\.2 s"):
            await play(script, rollout(2), options)

    async def test_pings_keep_a_session_alive(self):
        async def script(peer: Peer):
            await peer.video_start()
            await peer.until("session.ping")
            await peer.tell("session.pong")
            await peer.chunk(0)
            await peer.done()

        await play(script, rollout(1), SessionOptions(ping_interval_s=0.02))

    async def test_no_pings_when_off(self):
        async def script(peer: Peer):
            await peer.video_start()
            await asyncio.sleep(0.1)
            await peer.chunk(0)
            await peer.done()

        _, peer = await play(script, rollout(1), SessionOptions(ping_interval_s=0))
        assert peer.received == []

    async def test_a_prompt_update_follows_its_chunk(self):
        seen_after = []

        async def script(peer: Peer):
            await peer.video_start()
            for index in range(3):
                await peer.chunk(index)
                if index == 1:
                    await peer.until("session.interaction")
                seen_after.append(len(peer.received))
                await asyncio.sleep(0.02)
            await peer.done()

        update = PromptUpdate(1, "rain", 2)
        steered = load_workload(
            None,
            {"num_chunks": 3, "image": "https://h/a.png",
             "prompt_updates": [{"after_chunk": 1, "prompt": "rain", "transition_chunks": 2}]},
        )  # fmt: skip
        assert steered.prompt_updates == (update,)
        _, peer = await play(script, steered)
        assert seen_after == [0, 1, 1]
        assert peer.received[0] == {
            "type": "session.interaction",
            "interaction": {
                "event_id": "chunk-1", "event": {"prompt": "rain"}, "transition_chunks": 2,
            },
        }  # fmt: skip

    async def test_concurrency_is_a_limit(self):
        open_now, peak = 0, 0

        async def script(peer: Peer):
            nonlocal open_now, peak
            open_now += 1
            peak = max(peak, open_now)
            await peer.video_start()
            await asyncio.sleep(0.05)
            await peer.chunk(0)
            open_now -= 1
            await peer.done()

        async with scripted_server(script) as server:

            async def start(index: int, began: float):
                return await run_session(
                    server.url, rollout(1), SessionOptions(), session_index=index, run_began=began
                )

            results = await run_sessions(start, [0.0] * 5, 2)
        assert peak == 2
        assert [result.session_index for result in results] == [0, 1, 2, 3, 4]
        assert results[4].start_offset_s > results[0].start_offset_s

    async def test_one_failure_closes_the_other_sessions(self):
        async def script(peer: Peer):
            await peer.video_start()
            if len(server.peers) == 2:
                await peer.tell("error", message="full", code="server_full")
            await peer.socket.wait_closed()

        async with scripted_server(script) as server:

            async def start(index: int, began: float):
                return await run_session(
                    server.url, rollout(1), SessionOptions(), session_index=index, run_began=began
                )

            with pytest.raises(BenchmarkError, match="full"):
                await run_sessions(start, [0.0, 0.05], None)
            for peer in server.peers:
                await asyncio.wait_for(peer.socket.wait_closed(), 5)


async def whole_rollout(peer: Peer):
    await peer.video_start()
    for index in range(workload.chunks_for_frames(peer.start["num_frames"])):
        await peer.chunk(index, chunk_pixel_frames(index), b"%d" % index)
        await asyncio.sleep(0.01)
    await peer.done()


class TestCommand:
    async def run(self, script, *flags: str) -> int:
        async with scripted_server(script) as server:
            argv = ["--port", str(server.port), *flags]
            return await asyncio.to_thread(benchmark.main, argv)

    async def test_one_session(self, tmp_path, capsys):
        json_path, video_path = tmp_path / "out" / "r.json", tmp_path / "v.mp4"
        rc = await self.run(
            whole_rollout, "--num-chunks", "9", "--print-chunks",
            "--output-json", str(json_path), "--save-video", str(video_path),
        )  # fmt: skip
        out = capsys.readouterr()
        assert rc == 0
        assert video_path.read_bytes() == b"012345678"
        text = json_path.read_text()
        content = json.loads(text)
        assert text == json.dumps(content, sort_keys=True, indent=2) + "\n"
        assert content.keys() == {
            "benchmark", "timestamp", "endpoint", "model", "git_revision", "hostname", "workload",
            "config", "sessions", "metrics",
        }  # fmt: skip
        assert content["benchmark"] == "lingbot_world_realtime"
        assert content["workload"] == {
            "num_chunks": 9, "num_frames": 105, "width": 832, "height": 480, "fps": 16,
            "seed": 42, "flow_shift": 5.0, "video_seconds": 105 / 16, "prompt_updates": [],
        }  # fmt: skip
        assert content["config"].items() >= {
            "sessions": 1, "warmup_sessions": 0, "warmup_chunks": 6, "camera_pattern": "forward",
            "chunk_slo_ms": None, "target_fps": 16, "mux_fps": 16, "playback_buffer_chunks": 1,
            "workload_file": None,
        }.items()  # fmt: skip
        (session,) = content["sessions"]
        assert session.keys() >= {
            "session_index", "request_id", "video_start_ms", "chunks", "metrics",
        }  # fmt: skip
        assert session["chunks"][0].keys() == {
            "index", "arrival_s", "inter_arrival_ms", "byte_length", "num_frames",
        }  # fmt: skip
        assert content["metrics"] == {**session["metrics"], "sessions": 1}
        assert session["metrics"]["steady_chunks"] == 3
        for words in ("Connecting to ws://", "Rollout: 9 chunks, 105 frames", "Real time: 750.0",
                      "Cadence", "Real time", "Playback continuity", "chunk    8",
                      f"Wrote {json_path}", f"Wrote {video_path}"):  # fmt: skip
            assert words in out.out
        assert "WARNING: only 3 steady intervals" in out.err

    async def test_several_sessions_at_once(self, tmp_path, capsys):
        path = tmp_path / "r.json"
        rc = await self.run(
            whole_rollout, "--num-chunks", "8", "--concurrency", "3", "--warmup-sessions", "1",
            "--output-json", str(path),
        )  # fmt: skip
        out = capsys.readouterr().out
        assert rc == 0
        content = json.loads(path.read_text())
        assert [s["session_index"] for s in content["sessions"]] == [0, 1, 2]
        assert content["metrics"]["sessions"] == 3
        assert content["metrics"]["total_frames_per_second"] == pytest.approx(
            3 * 93 / content["metrics"]["makespan_seconds"]
        )
        for words in ("Warm-up session 1/1", "Session 2", "Across sessions"):
            assert words in out

    async def test_arrivals_by_rate(self, tmp_path):
        path = tmp_path / "r.json"
        rc = await self.run(
            whole_rollout, "--num-chunks", "2", "--sessions", "3", "--arrival-rate", "20",
            "--arrival-process", "uniform", "--output-json", str(path),
        )  # fmt: skip
        assert rc == 0
        content = json.loads(path.read_text())
        offsets = [session["start_offset_s"] for session in content["sessions"]]
        assert offsets[1] >= 0.05
        assert offsets[2] >= 0.10
        assert content["config"]["arrival_process"] == "uniform"

    async def test_a_failure_exits_with_one(self, capsys):
        async def script(peer: Peer):
            await peer.tell("error", message="bad picture")

        assert await self.run(script, "--num-chunks", "2") == 1
        assert "ERROR: the server reports: bad picture" in capsys.readouterr().err

    def test_no_server_and_no_picture_exit_with_one(self, capsys, tmp_path):
        assert benchmark.main(["--port", "1"]) == 1
        assert benchmark.main(["--port", "1", "--image", str(tmp_path / "none.png")]) == 1
        err = capsys.readouterr().err
        assert "ERROR: cannot connect to ws://127.0.0.1:1" in err
        assert "ERROR: image not found" in err
