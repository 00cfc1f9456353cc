#!/usr/bin/env bash
# sacrebleu 2.6.0 and rouge_score 0.1.2, on answers as short as those to questions. Guesses: right answers score 100, or
# 1; with a stemmer, "flies" is "fly" as "cats" is "cat". Seen: a corpus of right answers of three words has BLEU 0, and
# each answer alone 100; ROUGE-2 of a right answer of one word is 0; words of three letters are not stemmed, so "flies"
# ("fli") is not "fly", though "replies" is "reply".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q sacrebleu==2.6.0 rouge_score==0.1.2 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

answers = ["in May 1901", "by Oda Brink"]
corpus = sacrebleu.corpus_bleu(answers, [answers]).score
alone = [round(sacrebleu.sentence_bleu(answer, [answer]).score) for answer in answers]
scorer = RougeScorer(["rouge1", "rouge2"], use_stemmer=True)
rouge = {name: score.fmeasure for name, score in scorer.score("Bergen", "Bergen").items()}
pairs = [("cats", "cat"), ("replies", "reply"), ("flies", "fly"), ("dries", "dry")]
stems = {" ".join(pair): scorer.score(*pair)["rouge1"].fmeasure for pair in pairs}
print("BLEU of right answers", corpus, "alone", alone)
print("ROUGE of a right word", rouge)
print("stems", stems)
assert (corpus, alone) == (0, [100, 100])
assert rouge == {"rouge1": 1, "rouge2": 0}
assert list(stems.values()) == [1, 1, 0, 0]
PYTHON
# Output of 2026-11-30:
# BLEU of right answers 0.0 alone [100, 100]
# ROUGE of a right word {'rouge1': 1.0, 'rouge2': 0.0}
# stems {'cats cat': 1.0, 'replies reply': 1.0, 'flies fly': 0.0, 'dries dry': 0.0}
