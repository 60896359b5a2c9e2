"""What ``attn-ext bench`` measures, and how.

``cells`` says what is computed and how much work that is, ``peers`` who computes it, ``checks`` whether they
compute the same, ``timing`` how long they take, ``machine`` what is possible at best, and ``report`` and
``chart`` show it. Of batches of different lengths, ``packed`` and ``paged`` say what is computed and by whom,
and ``batch_report`` shows it. Of whole models, ``models`` says what they are and what they do, ``memory`` how
much they take, and ``model_report`` shows it.
"""
