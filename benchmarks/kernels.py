"""Every fused operation beside its peers, into benchmarks/results/: `tightfit bench kernels` with a place for its rows.

python benchmarks/kernels.py                       (GPU; peers that are not installed are listed as absent)
python benchmarks/kernels.py --op rms_norm --op glu
"""

import sys

from results import RESULTS

from tightfit.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "kernels", "--results", str(RESULTS)]
    main()
