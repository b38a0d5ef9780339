"""Rules: what goes with what, in one place and without torch. Each refuses with one sentence that names the fix.

| rules | asked about | asked by |
|---|---|---|
| `LEVER_RULES`, `LAYOUT_RULES` | one section by itself | its own validation |
| `RUN_RULES` | layout, levers, precision and the model's shape together | job, search, exports, trainer |
| `DEEPSPEED_RULES` | what DeepSpeed does of a job | job, exports |

A rule is a function that returns its sentence, or None where it has nothing against a run; `concerns` names the fields
it reads. What is not known yet (the shape of a model, the length of its rows) is left out of a `Run`, and rules about
it say nothing. A new lever or split adds its rules here and nowhere else.
"""
