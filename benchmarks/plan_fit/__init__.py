"""The plan's formulas beside measured steps, the rates that no data sheet gives, and an iteration of RLHF.

python -m benchmarks.plan_fit benchmarks/results/lora_step --fit machine
python -m benchmarks.plan_fit.rlhf --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 4096 --sequence 512

    points.py  measured points: peers, and the JSON of benchmarks that time training steps
    fit.py     formulas against points, and fitting
    rlhf.py    an iteration of PPO: four models
"""
