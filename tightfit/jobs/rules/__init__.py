"""Rules: which settings go together, in one place and without torch. Each refuses with a sentence that names the fix.

| rules | asked about | asked by |
|---|---|---|
| `LEVER_RULES`, `LAYOUT_RULES` | one section by itself | its own validation, search |
| `RUN_RULES` | layout, levers, precision and the model's shape together | job, search, exports, trainer |
| `DEEPSPEED_RULES` | what DeepSpeed supports of a job | job, exports |

A rule is a function that returns its sentence, or None if it allows the run; `concerns` names the fields it reads.
Facts that are not known yet (the shape of a model, the length of its rows) are None in a `Run`, and rules about them
return None. Every lever and every split has a file here with all that it does not go with. The first refusal counts,
in the order of the files' names; a rule returns None where another one refuses the same run with a better sentence.
Properties that several levers share (recomputes layers, has products of its own) are in jobs/lever_table.py, and rules
about them name no lever.
"""

from importlib import import_module
from pkgutil import iter_modules

for file in iter_modules(__path__):
    import_module(f"{__name__}.{file.name}")
