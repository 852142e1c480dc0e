"""Every cell of every kind of table comes out as the text that was meant."""

from datetime import date
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

from wsi_mil.errors import CohortError
from wsi_mil.table.files import did_you_mean, known, read_table, rename_columns, spelled_alike

IDS = ["0012", "12e3", "1_000", "7", "007", "NA", "1.0", "TRUE", "Präparat"]


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def cells(path: Path, column: str = "slide", **options: str) -> list[str]:
    return [row.cells[column] for row in read_table(path, **options).rows]


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding", "newline"),
    [
        ("t.csv", ",", "utf-8", "\n"),
        ("t.csv", ";", "utf-8-sig", "\r\n"),
        ("t.csv", ";", "cp1252", "\r\n"),
        ("t.csv", ",", "utf-16", "\n"),
        ("t.tsv", "\t", "utf-8", "\n"),
        ("t.txt", "\t", "utf-8", "\n"),
    ],
)
def test_text_tables_keep_every_id_as_it_is_written(tmp_path, name, delimiter, encoding, newline):
    lines = [delimiter.join(["slide", "label, free"[:5]]), *(delimiter.join([i, "0"]) for i in IDS)]
    assert cells(write(tmp_path / name, newline.join(lines), encoding)) == IDS


def test_a_quoted_cell_may_hold_the_delimiter_and_quotes_in_the_header_are_not_counted(tmp_path):
    path = write(tmp_path / "t.csv", 'slide;"a,b,c,d"\n"x;1";"say ""hi"""\n')
    assert read_table(path).columns == ("slide", "a,b,c,d")
    assert read_table(path).rows[0].cells == {"slide": "x;1", "a,b,c,d": 'say "hi"'}


def test_blank_lines_and_columns_without_a_name_are_left_out_and_lines_are_counted_as_in_the_file(tmp_path):
    table = read_table(write(tmp_path / "t.csv", "\n,slide,label\n\n0,a,1\n,,\n1,b\n"))
    assert table.columns == ("slide", "label")
    assert [(row.line, dict(row.cells)) for row in table.rows] == [
        (4, {"slide": "a", "label": "1"}),
        (6, {"slide": "b", "label": ""}),
    ]


def workbook(path: Path, **sheets: list[list[object]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def test_excel_texts_stay_and_whole_numbers_show_no_decimals(tmp_path):
    rows = [["slide", "value"], ["0012", 12.0], [12, 0.25], [12.0, True], ["12e3", None], ["1_000", "1,5"]]
    path = workbook(tmp_path / "t.xlsx", Sheet1=rows)
    assert cells(path) == ["0012", "12", "12", "12e3", "1_000"]
    assert cells(path, "value") == ["12", "0.25", "TRUE", "", "1,5"]


def test_zeros_that_excel_shows_by_its_cell_format_are_kept_and_dates_are_told(tmp_path):
    path = workbook(tmp_path / "t.xlsx", S=[["slide"], [12], [date(2024, 2, 1)]])
    book = openpyxl.load_workbook(path)
    book["S"]["A2"].number_format = "0000"
    book.save(path)
    assert cells(path) == ["0012", "2024-02-01"]
    assert "row 3: a date" in " ".join(read_table(path).notes)


def test_a_book_with_several_filled_sheets_needs_a_sheet(tmp_path):
    path = workbook(tmp_path / "t.xlsx", Cohort=[["slide"], ["a"]], Legend=[["slide"], ["b"]], Empty=[])
    assert cells(path, sheet="Legend") == ["b"]
    with pytest.raises(CohortError, match=r"several sheets hold data: Cohort, Legend\."):
        read_table(path)
    with pytest.raises(CohortError, match=r"no sheet 'cohort' with data.*Did you mean 'Cohort'"):
        read_table(path, sheet="cohort")


def test_parquet_keeps_texts_and_shows_whole_numbers_without_decimals(tmp_path):
    frame = pd.DataFrame({"slide": ["0012", "12e3", None], "n": [1.0, 2.0, None], "x": [0.5, 1.5, 2.0], "k": [7, 8, 9]})
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    assert [tuple(row.cells.values()) for row in table.rows] == [
        ("0012", "1", "0.5", "7"),
        ("12e3", "2", "1.5", "8"),
        ("", "", "2", "9"),
    ]
    assert "1.0 is read as 1" in table.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "slide,label,slide\na,1,b\n", "column slide is there twice"),
        ("t.csv", "slide,label\na,1,surplus\n", "line 2: 3 cells, but the header has 2 columns"),
        ("t.doc", "slide\n", "not a table this program reads"),
        ("t.xlsx", "not a zip", "cannot be opened as an Excel file"),
        ("t.parquet", "not parquet", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_is_no_table_says_why(tmp_path, name, text, words):
    with pytest.raises(CohortError, match=words):
        read_table(write(tmp_path / name, text))


def test_a_missing_file_and_a_sheet_of_a_csv_are_refused(tmp_path):
    with pytest.raises(CohortError, match="no such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(CohortError, match="only Excel files have sheets"):
        read_table(write(tmp_path / "t.csv", "slide\na\n"), sheet="S")


@pytest.mark.parametrize("text", ["", "  ", "NA", "N/A", "NaN", "nan", "None", "null", "#N/A", "?", " NA "])
def test_spellings_of_not_known_are_none(text):
    assert known(text) is None


@pytest.mark.parametrize("text", ["0", "none", "unknown", "No", "n"])
def test_other_words_are_values(text):
    assert known(f" {text} ") == text


def test_columns_get_our_names_and_a_hidden_one_is_told(tmp_path):
    table = read_table(write(tmp_path / "t.csv", "FILENAME,slide,case\nf,s,c\n"))
    renamed = rename_columns(table, {"slide": "FILENAME", "patient": "FILENAME"})
    assert renamed.rows[0].cells == {"slide": "f", "patient": "f", "case": "c"}
    assert "column 'slide' is not used" in renamed.notes[0]


def test_an_unknown_column_lists_those_that_are_there_and_the_nearest(tmp_path):
    table = read_table(write(tmp_path / "t.csv", "FILE_NAME,Case\nf,c\n"))
    with pytest.raises(
        CohortError, match=r"no column 'filename'.*Columns: FILE_NAME, Case\. Did you mean 'FILE_NAME'\?"
    ):
        rename_columns(table, {"slide": "filename"})


def test_no_likeness_no_proposal():
    assert did_you_mean("slide", ["zzz"]) == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfes\0l", "UTF-16"),
        ("slide,label\n1,2\n".encode("utf-16-le"), "zero bytes.*CSV UTF-8"),
        (b"slide,label\n1," + b"x" * 200_000, "quotation mark"),
    ],
)
def test_text_that_is_none_says_why(tmp_path, data, words):
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(CohortError, match=words):
        read_table(tmp_path / "t.csv")


def test_an_error_of_excel_is_no_value():
    assert {known(text) for text in ("#REF!", "#DIV/0!", " #VALUE! ", "#NAME?", "#NUM!", "#NULL!", "#N/A")} == {None}


def test_values_that_people_take_for_one_are_grouped():
    assert spelled_alike(["Tumour", "tumour", "no tumour", "No  Tumour", "x"]) == [
        ("No  Tumour", "no tumour"),
        ("Tumour", "tumour"),
    ]
    assert spelled_alike(["a", "b", "a"]) == []
