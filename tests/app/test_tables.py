"""Clock tables: every readable row comes back, every untrustworthy one is named by line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core.errors import FileError
from kilter.core.setting import Setting
from kilter.core.units import MHZ
from kilter.device.sim.replay import COLUMNS, load_tables

HEADER = ",".join(COLUMNS) + "\n"


@pytest.fixture
def table(tmp_path):
    def write(body, header=HEADER):
        path = tmp_path / "table.csv"
        path.write_text(header + body, encoding="utf-8")
        return path

    return write


def test_rows_come_back_in_si_units(table):
    (workload,) = load_tables(table("s,V100,gemm,1380,877,250,2.5,100,250\n"))
    (row,) = workload.rows
    assert (workload.source, workload.gpu, workload.name) == ("s", "V100", "gemm")
    assert row.setting == Setting(
        sm_clock_hz=1380 * MHZ, memory_clock_hz=877 * MHZ, power_limit_w=250
    )
    assert (row.time_s, row.power_w, row.energy_j) == (2.5, 100.0, 250.0)


def test_the_work_of_a_row_is_read_where_the_table_has_it(table):
    header = HEADER.strip() + ",flops,bytes_moved\n"
    body = "s,V100,gemm,1380,877,250,2.5,100,250,4e12,\n"
    (row,) = load_tables(table(body, header))[0].rows
    assert (row.flops, row.bytes_moved) == (4e12, None)
    with pytest.raises(FileError, match="flops=-1 must be positive"):
        load_tables(table(body.replace("4e12", "-1"), header))


def test_workloads_are_separated_by_card_and_name(table):
    body = "s,A,x,100,,,1,1,1\ns,B,x,100,,,1,1,1\ns,A,y,100,,,1,1,1\ns,A,x,200,,,1,1,1\n"
    assert [(w.gpu, w.name, len(w.rows)) for w in load_tables(table(body))] == [
        ("A", "x", 2),
        ("B", "x", 1),
        ("A", "y", 1),
    ]


def test_sources_that_measured_the_same_setting_are_not_mixed(table):
    body = "one,A,x,100,,,1,1,1\none,A,x,200,,,1,1,1\ntwo,A,x,100,,,9,1,9\n"
    assert [(w.source, len(w.rows)) for w in load_tables(table(body))] == [("one", 2), ("two", 1)]


def test_sources_that_measured_different_settings_are_one_workload(table):
    (workload,) = load_tables(table("one,A,x,100,,,1,1,1\ntwo,A,x,200,,,1,1,1\n"))
    assert len(workload.rows) == 2


@pytest.mark.parametrize(
    ("body", "default"),
    [
        ("s,g,w,1000,,,1,1,1\ns,g,w,,,,1,1,1\n", Setting()),
        ("s,g,w,900,5,,1,1,1\ns,g,w,1000,1,,1,1,1\ns,g,w,1000,2,,1,1,1\n", (1000, 2, None)),
        ("s,g,w,1000,,150,1,1,1\ns,g,w,1000,,300,1,1,1\ns,g,w,900,,300,1,1,1\n", (1000, None, 300)),
        ("s,g,w,,,100,1,1,1\ns,g,w,,,250,1,1,1\n", (None, None, 250)),
    ],
)
def test_default_row(table, body, default):
    if isinstance(default, tuple):
        core, memory, limit = default
        default = Setting(
            sm_clock_hz=core and core * MHZ,
            memory_clock_hz=memory and memory * MHZ,
            power_limit_w=limit,
        )
    (workload,) = load_tables(table(body))
    assert workload.default.setting == default


def test_blank_power_or_energy_is_computed_from_the_other(table):
    (workload,) = load_tables(table("s,g,w,1,,,2,,10\ns,g,w,2,,,2,10,\n"))
    assert [(r.power_w, r.energy_j) for r in workload.rows] == [(5.0, 10.0), (10.0, 20.0)]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_of_a_spreadsheet_may_have_other_separators(table, separator):
    body = "s,V100,gemm,1380,877,250,2.5,100,250\n"
    (expected,) = load_tables(table(body))
    path = table(body.replace(",", separator), HEADER.replace(",", separator))
    assert load_tables(path) == (expected,)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_ends_of_lines_end_a_line(table, end):
    path = table(HEADER.join(["", "s,g,a\u2028b\x0c,1,,,1,1,1\n"]), header="")
    path.write_bytes(path.read_text().replace("\n", end).encode())
    assert [workload.name for workload in load_tables(path)] == ["a\u2028b"]


def test_extra_columns_bom_and_blank_lines_are_accepted(table):
    path = table("s,g,w,1,,,1,1,1,note\n\n", header="\ufeff" + HEADER.strip() + ",note\n")
    assert len(load_tables(path)) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("s,g,w,1,,,1,1,1\ns,g,w,fast,,,1,1,1\n", ":3: core_mhz='fast' is not a number"),
        ("s,g,w,1,,,nan,1,1\n", ":2: time_s=nan"),
        ("s,g,w,1,,,1,inf,1\n", ":2: power_w=inf"),
        ("s,g,w,1,,,0,1,1\n", ":2: time_s=0"),
        ("s,g,w,1.38e9,,,1,1,1\n", ":2: core_mhz=1.38e9 is too large for a clock in MHz"),
        ("s,g,w,1,877000,,1,1,1\n", ":2: mem_mhz=877000 is too large for a clock in MHz"),
        ("s,g,w,1,,,1,1,-4\n", ":2: energy_j=-4"),
        ("s,g,w,1,,,1e308,1e300,\n", ":2: time_s=1e308 is beyond"),
        ("s,g,w,1,,,1e-200,,1\n", ":2: time_s=1e-200 is beyond"),
        ("s,g,w,1,,,,1,1\n", ":2: time_s is blank"),
        ("s,g,w,1,,,1,,\n", ":2: power_w and energy_j"),
        ("s,g,w,1,,,1,1\n", ":2: 8 fields"),
        ("s,g,w,1,,,1,1,1,1\n", ":2: 10 fields"),
        ("s,,w,1,,,1,1,1\n", ":2: gpu or workload is blank"),
        ("s,g,w,1,,,1,1,1\ns,g,w,1,,,2,1,2\n", ":3: g 'w' at SM 1 MHz is already on line 2"),
        ('s,g,"w,1,,,1,1,1\n', "not a CSV line"),
        ("", "holds no measurements"),
    ],
)
def test_what_cannot_be_trusted_is_named(table, body, said):
    with pytest.raises(FileError) as raised:
        load_tables(table(body))
    assert said in str(raised.value)
    assert "table.csv" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_column_empty_file_and_binary_file(table, tmp_path):
    with pytest.raises(FileError, match="missing columns: energy_j"):
        load_tables(table("", header=HEADER.replace(",energy_j", "")))
    with pytest.raises(FileError, match="empty"):
        load_tables(table("", header=""))
    with pytest.raises(FileError, match="cannot be read"):
        load_tables(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="UTF-8"):
        load_tables(tmp_path / "binary.csv")


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_table_or_one_clear_line(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "t.csv"
    path.write_text(HEADER + text, encoding="utf-8", errors="surrogatepass")
    try:
        workloads = load_tables(path)
    except FileError as error:
        said = str(error)
    else:
        said = ""
        assert all(row.time_s > 0 for workload in workloads for row in workload.rows)
    assert not said or "t.csv" in said
