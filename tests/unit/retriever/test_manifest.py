import json
import shutil
from pathlib import Path

import pytest

from retriever.building.build import build
from retriever.building.spec import BuildSpec
from retriever.building.verify import verify
from retriever.encoders.hashed import HashedSettings
from retriever.index import Index
from retriever.manifest import FileRecord, IndexFault, Manifest, checksum_of, record_of, sample_of

SPEC = BuildSpec(encoder=HashedSettings(dim=128), bm25=True)
LARGE = 32 * 64 * 1024


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("built")
    corpus = tmp_path / "corpus.jsonl"
    lands = enumerate(["Norway", "Italy", "France"])
    corpus.write_text("".join(json.dumps({"id": f"doc{i}", "contents": f"the capital of {land}"}) + "\n" for i, land in lands))
    return build(corpus, tmp_path / "index", SPEC)


@pytest.fixture
def directory(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "index"))


def altered(directory: Path, **change: object) -> Path:
    """With a manifest that says something else, and whose checksum is right."""
    path = directory / "manifest.json"
    plain = json.loads(path.read_text()) | change
    path.write_text(json.dumps(plain | {"checksum": checksum_of(plain)}))
    return directory


def test_what_is_written_is_read_again(directory: Path):
    manifest = Manifest.read(directory)
    identity = manifest.identity
    manifest.write(directory)
    assert Manifest.read(directory) == manifest
    assert Manifest.read(directory).identity == identity


def test_versions_do_not_change_the_identity_and_everything_else_does(directory: Path):
    identity = Manifest.read(directory).identity
    assert Manifest.read(altered(directory, versions={"python": "4"})).identity == identity
    assert Manifest.read(altered(directory, count=2)).identity != identity


@pytest.mark.parametrize("name", ["documents.jsonl", "offsets.npy", "ids.npy", "vectors.faiss", "idf.npy", "bm25/scores.npy"])
def test_an_altered_file_is_refused(directory: Path, name: str):
    path = directory / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IndexFault, match=f"{name} is not the file that was built: its sampled bytes differ"):
        Index.open(directory)
    path.write_bytes(data + b" ")
    with pytest.raises(IndexFault, match=rf"{name} is not the file that was built: {len(data) + 1} bytes, the manifest says {len(data)}"):
        Index.open(directory)
    path.unlink()
    with pytest.raises(IndexFault, match=f"{name} is missing"):
        Index.open(directory)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 1}, "has format 1, this version reads 2: build again"),
        ({"format": None}, "has format None"),
        ({"count": 4}, "does not fit together"),
        ({"count": True}, "count must be a positive integer, got True"),
        ({"count": 0}, "count must be a positive integer, got 0"),
        ({"files": {}}, "incomplete or altered: files lacks documents.jsonl, offsets.npy"),
        ({"dense": None}, "dense and encoder belong together"),
        ({"dense": None, "encoder": None, "bm25": None}, "neither dense nor bm25"),
        ({"documents": {"file": "../secret", "ids": "rows", "source": {"name": "", "bytes": 0, "sha256": ""}}}, "files lacks ../secret"),
        ({"documents": None}, "incomplete or altered"),
        ({"encoder": {"kind": "hashed", "dim": 64, "word_weight": 1.0, "trigram_weight": 0.4, "passages": 3}}, "vectors of 128, an encoder of 64"),
        (
            {"encoder": {"kind": "hashed", "dim": 128, "word_weight": 0.0, "trigram_weight": 1.0, "passages": 3}},
            r"not those that this encoder makes of the documents \(cosine",
        ),
        ({"encoder": {"kind": "no such", "dim": 128}}, "an encoder is of kind"),
        ({"encoder": {"kind": "transformer", "model": "/no/such"}}, "is not at /no/such any more: say where it lies by --model DIR"),
        ({"encoder": {"kind": "hashed", "dim": 128}}, "a hashed encoder's record has"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(directory: Path, change: dict, complaint: str):
    with pytest.raises(IndexFault, match=complaint):
        Index.open(altered(directory, **change))


def test_an_edited_manifest_is_refused_though_all_of_its_files_are_there(directory: Path):
    # an edited query_prefix or k1 was taken: only documents are embedded again when an index is opened
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"b": 0.75', '"b": 0.5'))
    with pytest.raises(IndexFault, match=r"manifest\.json was edited after it was built"):
        Manifest.read(directory)


def test_verifying_names_all_files_that_are_not_those_that_were_built(directory: Path):
    (directory / "idf.npy").unlink()
    for name in ("offsets.npy", "vectors.faiss"):
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IndexFault) as raised:
        verify(directory)
    told = str(raised.value).splitlines()
    assert len(told) == 3
    assert all(any(name in line for line in told) for name in ("offsets.npy", "vectors.faiss", "idf.npy"))
    assert all(line.endswith("copy it again from where it was built, or build again") for line in told)


def test_a_file_above_the_directory_is_refused(directory: Path):
    files = json.loads((directory / "manifest.json").read_text())["files"]
    with pytest.raises(IndexFault, match="must be named by its absolute path"):
        Manifest.read(altered(directory, files=files | {"../../etc/passwd": {"bytes": 1, "sha256": "", "sample": ""}}))


def test_a_directory_without_a_manifest_is_no_index(tmp_path: Path):
    with pytest.raises(IndexFault, match="is no index"):
        Index.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[")
    with pytest.raises(IndexFault, match="not JSON"):
        Index.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(IndexFault, match="has format None"):
        Index.open(tmp_path)


def test_a_sample_holds_the_size_the_ends_and_blocks_between(tmp_path: Path):
    path = tmp_path / "large"
    data = bytearray(2 * LARGE)
    path.write_bytes(data)
    before = sample_of(path)
    for place in (0, len(data) - 1, (len(data) - 65536) // 31):
        data[place] = 1
        path.write_bytes(data)
        assert sample_of(path) != before
        data[place] = 0
    path.write_bytes(data)
    assert sample_of(path) == before
    path.write_bytes(data + b"\0")
    assert sample_of(path) != before


def test_verifying_finds_what_a_sample_misses(tmp_path: Path):
    path = tmp_path / "large"
    data = bytearray(2 * LARGE)
    path.write_bytes(data)
    record = record_of(path)
    assert record == FileRecord(bytes=4194304, sha256="bb9f8df61474d25e71fa00722318cd387396ca1736605e1248821cc0de3d3af8", sample=record.sample), (
        "sha256 of 4 MiB of zeros"
    )
    data[70_000] = 1  # between two blocks
    path.write_bytes(data)
    again = record_of(path)
    assert (again.sample == record.sample, again.sha256 == record.sha256) == (True, False)
