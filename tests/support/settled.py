"""What forked workers need not do again; imported last by :mod:`warm_processes`.

The processor has been asked what it is. And all that is imported so far is out of the garbage collector's sight: each
full collection would go through millions of objects of libraries, and in a forked process write to all of their pages,
which are shared until then.
"""

import gc
from contextlib import suppress

from rapidformer_templates.switches.zero.compiled_parts import ask_processor_once

ask_processor_once()
with suppress(ImportError):
    import cpuinfo

    cpuinfo.get_cpu_info()
gc.collect()
gc.freeze()
