from tiling.readers.fingerprint import fingerprint, slide_files


def test_a_mirax_slide_is_its_file_and_its_folder(tmp_path):
    for name in ("a.mrxs", "a/Data0000.dat", "a/deep/Index.dat", "b/other.dat"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    facts = {"openslide.vendor": "mirax", "openslide.quickhash-1": "q"}
    names = [path.relative_to(tmp_path).as_posix() for path in slide_files(tmp_path / "a.mrxs", facts)]
    assert names == ["a.mrxs", "a/Data0000.dat", "a/deep/Index.dat"]
    known = fingerprint(tmp_path / "a.mrxs", facts, ((1, 1),))
    (tmp_path / "b" / "other.dat").write_bytes(b"longer than before")
    assert fingerprint(tmp_path / "a.mrxs", facts, ((1, 1),)) == known
    (tmp_path / "a" / "Data0000.dat").write_bytes(b"longer than before")
    assert fingerprint(tmp_path / "a.mrxs", facts, ((1, 1),)) != known


def test_a_hamamatsu_list_names_its_pictures(tmp_path):
    for name in ("a.vms", "a-0.jpg", "a-1.jpg", "stranger.jpg"):
        (tmp_path / name).write_bytes(b"12345")
    facts = {"openslide.vendor": "hamamatsu", "hamamatsu.ImageFile": "a-0.jpg", "hamamatsu.ImageFile(1,0)": "a-1.jpg"}
    assert [path.name for path in slide_files(tmp_path / "a.vms", facts | {"hamamatsu.Note": "x" * 5000})] == [
        "a.vms",
        "a-0.jpg",
        "a-1.jpg",
    ]


def test_without_a_quickhash_header_and_structure_count(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(b"x" * 100_000)
    facts = {"openslide.vendor": "generic-tiff", "tiff.Software": "a"}
    known = fingerprint(path, facts, ((10, 10),))
    assert fingerprint(path, dict(reversed(facts.items())), ((10, 10),)) == known
    assert fingerprint(path, facts | {"tiff.Software": "b"}, ((10, 10),)) != known
    assert fingerprint(path, facts, ((10, 11),)) != known
    path.write_bytes(b"y" + b"x" * 99_999)
    assert fingerprint(path, facts, ((10, 10),)) != known
