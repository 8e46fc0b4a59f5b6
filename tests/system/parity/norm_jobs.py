"""Jobs about the norm of gradients that run on ranks."""

from __future__ import annotations

from itertools import product

from models import section
from running import LEFT, Spec, backward, forward, run, scaled, see, update


def norms(cases, factors, steps=3):
    """{(case, factor): (norms of each step over the factor, overflows, distance of the weights from the start)}.

    cases: {name: (recipe, None for stock; fields)}. The loss is multiplied by the factor, clipped to a norm of 1.
    """
    found = {}
    norm = see(lambda engine: float(engine.get_global_grad_norm()))
    overflow = see(lambda engine: bool(engine.optimizer.overflow))
    for (name, (recipe, fields)), factor in product(cases.items(), factors):
        spec = Spec(recipe and section(recipe, **fields), config={"gradient_clipping": 1.0})
        events = [forward, scaled(factor), backward, update, norm, overflow] * steps
        trace = run(spec, [see(LEFT["weights"]), *events], ("weights",))
        start, *seen = trace.seen
        distance = sum((trace.weights[n] - start[n]).double().square().sum() for n in start).sqrt().item()
        found[name, factor] = [each / factor for each in seen[::2]], sum(seen[1::2]), distance
    return found
