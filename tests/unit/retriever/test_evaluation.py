import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from retriever.corpus import Document
from retriever.documents import DocumentStore
from retriever.evaluation import Arm, evaluate, judged_by_answers, judged_by_ids, judged_by_qrels, normalized
from retriever.query import Hit, Mode, Query
from retriever.questions import Question, QuestionError, read_qrels, read_questions

TEXTS = ["Oslo lies in Norway.", "The Panthers gave up 308 points.", "Bergen, too, is in Norway!", "3080 seats"]
DENSE, BM25 = Arm(mode=Mode.DENSE), Arm(mode=Mode.BM25)
ORDERS = {Mode.DENSE: [0, 1, 2, 3], Mode.BM25: [2, 1, 0]}  # rows as each mode finds them, whatever is asked


def store() -> DocumentStore:
    rows = [{"id": f"d{row}", "contents": text} for row, text in enumerate(TEXTS)]
    return DocumentStore.of([Document(id=row["id"], contents=row["contents"], json=json.dumps(row).encode()) for row in rows])


def search(queries: Sequence[Query]) -> list[list[Hit]]:
    orders = [ORDERS[query.mode or Mode.DENSE][:: -1 if query.rerank else 1][: query.topk] for query in queries]
    return [[Hit(row=row, score=-float(place)) for place, row in enumerate(order)] for order in orders]


def asked(*gold: tuple[str, ...], answers: tuple[str, ...] = ()) -> list[Question]:
    return [Question(id=str(number), text="?", gold=some, answers=answers) for number, some in enumerate(gold)]


def test_gold_ids_by_hand():
    # Dense finds d0 d1 d2 d3, BM25 d2 d1 d0.
    judged = judged_by_ids(asked(("d0",), ("d1", "d2"), ("d3",)), store())
    evaluation = evaluate(search, judged, [DENSE, BM25], documents=4, topk=(1, 2))
    assert evaluation.measures == ["recall@1", "recall@2", "MRR@10", "nDCG@10"]
    assert evaluation.scores[DENSE]["recall@2"] == [1, 1 / 2, 0]
    assert evaluation.scores[BM25]["recall@2"] == [0, 1, 0]
    assert evaluation.scores[DENSE]["MRR@10"] == [1, 1 / 2, 1 / 4]
    assert evaluation.scores[BM25]["MRR@10"] == [1 / 3, 1, 0]
    # d1 and d2 at ranks 2 and 3: (1/log2 3 + 1/2) / (1 + 1/log2 3)
    assert evaluation.scores[DENSE]["nDCG@10"][1] == pytest.approx(0.69343, abs=1e-5)
    assert evaluation.interval(DENSE, "recall@2").mean == 0.5
    assert evaluation.difference(BM25, DENSE, "MRR@10").mean == pytest.approx((4 / 3 - 7 / 4) / 3)


def test_qrels_are_graded_and_questions_without_anything_relevant_are_left_out(tmp_path: Path):
    path = tmp_path / "qrels.txt"
    path.write_text("0 0 d1 2\n0 0 d0 1\n0 0 d9 0\n1 0 d2 0\n")
    judged = judged_by_qrels(asked((), (), ()), read_qrels(path), store())
    assert (len(judged.questions), judged.left_out) == (1, 2)
    exponential = evaluate(search, judged, [DENSE], documents=4).scores[DENSE]["nDCG@10"]
    linear = evaluate(search, judged, [DENSE], documents=4, gain="linear").scores[DENSE]["nDCG@10"]
    # Found d0 (1), d1 (2); best d1, d0.
    assert exponential == [pytest.approx((1 + 3 / 1.584963) / (3 + 1 / 1.584963), abs=1e-6)]
    assert linear == [pytest.approx((1 + 2 / 1.584963) / (2 + 1 / 1.584963), abs=1e-6)]


def test_beirs_judgements_are_read_as_trecs(tmp_path: Path):
    (tmp_path / "trec").write_text("q1 0 d1 2\nq1 0 d2 0\n")
    (tmp_path / "beir").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\n")
    assert read_qrels(tmp_path / "trec") == read_qrels(tmp_path / "beir") == {"q1": {"d1": 2.0, "d2": 0.0}}


def test_answers_are_found_as_whole_words_after_squads_normalisation():
    assert normalized("The  Panthers, a team!") == "panthers team"
    judged = judged_by_answers([*asked((), answers=("308",)), Question(id="x", text="?", answers=("the",))], store())
    evaluation = evaluate(search, judged, [DENSE, BM25], documents=4, topk=(1, 2))
    assert evaluation.measures == ["answer@1", "answer@2", "MRR@10"]
    assert {name: scores[0] for name, scores in evaluation.scores[DENSE].items()} == {
        "answer@1": 0,
        "answer@2": 1,
        "MRR@10": 1 / 2,
    }  # not the 3080 seats
    assert (evaluation.questions, evaluation.left_out) == (1, 1)  # nothing is left of "the"


def test_an_answer_that_no_document_has_scores_nothing():
    evaluation = evaluate(search, judged_by_answers(asked((), answers=("Stockholm",)), store()), [BM25], documents=4)
    assert evaluation.scores[BM25]["MRR@10"] == [0]


def test_reranking_is_an_arm_of_its_own():
    reranked = Arm(mode=Mode.DENSE, rerank=True)
    evaluation = evaluate(search, judged_by_ids(asked(("d3",)), store()), [DENSE, reranked], documents=4)
    assert evaluation.scores[reranked]["recall@1"] == [1]
    assert "| dense + rerank - dense | +1.000 (+1.000 to +1.000) |" in evaluation.render()


def test_the_table_and_the_record_say_the_same():
    evaluation = evaluate(search, judged_by_ids(asked(("d0",), ("d1",)), store()), [DENSE, BM25], documents=4, topk=(1,))
    lines = evaluation.render().splitlines()
    assert lines[0] == "2 questions by gold ids over 4 documents; 95 % bootstrap intervals over questions"
    assert lines[2:5] == ["| mode | recall@1 | MRR@10 | nDCG@10 |", "|---|---|---|---|", lines[4]]
    assert lines[4].startswith("| dense | .500 (.000 to 1.000) | .750 (.500 to 1.000) |")
    record = json.loads(json.dumps(evaluation.record()))
    assert record["arms"]["dense"]["recall@1"] == {"mean": 0.5, "low": 0.0, "high": 1.0}
    assert list(record["differences"]) == ["bm25 - dense"]


def test_gold_ids_of_another_corpus_are_told_with_examples():
    questions = asked(("d0",), ("xq7",), ("xq8", "xq9", "xq10"))
    with pytest.raises(QuestionError, match=r"4 relevant ids are of no document in the index, e\.g\. 'xq7', 'xq8', 'xq9'; its ids look like 'd0'"):
        judged_by_ids(questions, store())
    judged = judged_by_ids(questions, store(), allow_missing=True)
    assert evaluate(search, judged, [DENSE], documents=4).scores[DENSE]["recall@5"] == [1, 0, 0]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: evaluate(search, judged_by_ids(asked(()), store()), [DENSE], documents=4), "no question with gold ids: nothing is relevant to 1"),
        (lambda: evaluate(search, judged_by_ids(asked(("d0",)), store()), [], documents=4), "at least one mode"),
        (lambda: evaluate(search, judged_by_ids(asked(("d0",)), store()), [DENSE], documents=4, topk=(0,)), "cut-offs of 1 or more"),
        (lambda: judged_by_qrels(asked(()), {"q": {"d0": 1.0}}, store()), r"of questions such as \['q'\], the questions are \['0'\]"),
        (lambda: judged_by_answers(asked(("d0",)), store()), "no question has `golden_answers`"),
    ],
)
def test_what_cannot_be_evaluated_is_told(call, complaint: str):
    with pytest.raises(QuestionError, match=complaint):
        call()


def test_questions_are_read_in_all_their_shapes(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"id": "q", "question": "who", "positive_passage": "d0", "golden_answers": ["x", 3]},
        {"query": "what", "positive_passages": ["d1", "d2", "d1"], "golden_answers": "y"},
    ]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert read_questions(path) == [
        Question(id="q", text="who", gold=("d0",), answers=("x", "3")),
        Question(id="3", text="what", gold=("d1", "d2"), answers=("y",)),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "there is no question"),
        (b"{", "f:1: not JSON"),
        (b'{"question": " "}', "f:1: expected an object with a string `question`"),
        (b'[1]', "f:1: expected an object"),
        (b'{"question": "q", "id": "1"}\n{"question": "q", "id": 1}', "f:2: the id '1' comes twice"),
        (b'{"question": "q", "id": true}', "f:1: expected an id"),
        (b'{"question": "q", "golden_answers": [null]}', "golden_answers to be a list"),
        (b'{"question": "q", "positive_passages": "d0"}', "positive_passages to be a list"),
        (b"\xff", "not UTF-8"),
    ],
)  # fmt: skip
def test_wrong_questions_are_told_by_file_and_line(tmp_path: Path, content: bytes, complaint: str):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(QuestionError, match=complaint):
        read_questions(tmp_path / "f")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no judgement"),
        ("a b", "f:1: expected"),
        ("a 0 b high", "f:1: expected"),
        ("a 0 b nan", "f:1: expected"),
        ("a 0 b 2000", "f:1: expected .* the grade from -1000 to 1000"),
        ("a 0 b 1 x", "f:1"),
        ("a 0 b 1\na 0 b 2", "f:2: 'b' is judged twice"),
    ],
)
def test_wrong_judgements_are_told_by_file_and_line(tmp_path: Path, content: str, complaint: str):
    (tmp_path / "f").write_text(content)
    with pytest.raises(QuestionError, match=complaint):
        read_qrels(tmp_path / "f")
