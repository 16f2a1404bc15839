"""Making the demo pair: its corpus, its two models, their training, evaluation and model card."""
