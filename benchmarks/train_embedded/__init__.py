"""Recipe of the embedded model: corpora, synthetic text, training, export, evaluation."""
