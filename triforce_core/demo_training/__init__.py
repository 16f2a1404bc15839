"""How the embedded demo pair is made: its corpus, its two models, their training, its figures and its card."""
