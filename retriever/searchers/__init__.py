"""What finds documents: by vectors (FAISS, blocks), by words (BM25), and by both lists at once (fusion)."""
