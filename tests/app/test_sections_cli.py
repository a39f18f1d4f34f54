"""`kilter sections`: what it prints, its JSON, its page, and how it refuses."""

import json
from html.parser import HTMLParser

import pytest
from tests.observe.traces import job, kernel, trace, write

from kilter.app.cli.main import main


@pytest.fixture
def pair(tmp_path):
    return [
        str(write(tmp_path / "rank0.json", job(0))),
        str(write(tmp_path / "rank1.json.gz", job(1, late_us=300.0))),
    ]


def test_json_has_the_promised_keys(pair, capsys):
    assert main(["sections", *pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["label"]) == ("kilter.sections/1", "measured")
    rank = found["ranks"][0]
    promised = "rank iterations iteration_s compute_s comm_s exposed_s overlapped_s idle_s"
    assert {*promised.split(), "wait_s", "transfer_s", "sections"} <= set(rank)
    keys = {"key", "op", "group", "bytes", "start_s", "length_s", "exposed_s", "wait_s"}
    assert keys <= set(rank["sections"][0])
    assert rank["exposed_s"] == pytest.approx(500e-6)
    assert rank["per_iteration"][0]["exposed_s"] == pytest.approx(500e-6)


def test_the_answer_comes_first(pair, capsys):
    assert main(["sections", *pair]) == 0
    out = capsys.readouterr().out
    assert out.startswith("50.8 % of the iteration is exposed communication on rank 0")
    assert "all_reduce/default_pg/1" in out


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.parts, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "rect":
            self.parts.append(dict(attributes)["class"])


def test_the_page_draws_exposed_and_waiting_parts(pair, tmp_path, capsys):
    assert main(["sections", *pair, "--html", str(tmp_path / "s.html")]) == 0
    text = (tmp_path / "s.html").read_text()
    page = _Page()
    page.feed(text)
    assert {"part compute", "part transferring", "part waiting"} <= set(page.parts)
    assert "script" not in page.tags
    assert "50.8 % of the iteration is exposed" in text.partition("</h1>")[0]


def test_what_a_trace_says_is_escaped(tmp_path):
    content = job(0)
    content["distributedInfo"]["pg_config"][0]["pg_desc"] = "<script>alert(1)</script>"
    write(tmp_path / "a.json", content)
    page = tmp_path / "s.html"
    assert main(["sections", str(tmp_path / "a.json"), "--html", str(page)]) == 0
    assert "<script>" not in page.read_text()


def test_a_broken_trace_beside_a_whole_one_is_left_out_by_name(pair, tmp_path, capsys):
    broken = tmp_path / "rank2.json"
    broken.write_bytes(json.dumps(job(2)).encode()[:2000])
    assert main(["sections", *pair, str(broken)]) == 0
    assert "rank2.json: not a complete JSON file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"traceEvents": [{"ph": "X"', "complete JSON"),
        ("{}", "no traceEvents"),
        ('{"schema": "kilter.trace/1"}', "no traceEvents): this is a file of kilter's own"),
        (json.dumps({"traceEvents": []}), "no GPU kernels"),
        (json.dumps({"traceEvents": [kernel("gemm", 5, -1)]}), "lasts no time"),
    ],
)
def test_broken_input_is_one_line_and_exit_code_1(tmp_path, capsys, content, words):
    path = tmp_path / "t.json"
    path.write_text(content)
    assert main(["sections", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_missing_files_and_wrong_numbers(tmp_path, capsys):
    assert main(["sections", str(tmp_path / "no.json")]) == 1
    path = write(tmp_path / "t.json", trace([kernel("gemm", 0, 10)]))
    assert main(["sections", str(path), "--iterations", "0"]) == 2
    capsys.readouterr()
    assert main(["sections", str(path)]) == 0
    assert "No communication kernels" in capsys.readouterr().out
