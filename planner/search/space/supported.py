"""The space without exchanges that no run made (`calibration.mechanisms.Mechanism.leads`)."""

from dataclasses import replace

from planner.calibration.basis import unmeasured_mechanisms
from planner.calibration.mechanisms import CUT, FAR_EXPERTS
from planner.cost.price import Pricer
from planner.search.space.domains import Domains, Values, domains_of
from planner.search.space.enumerate import Space, enumerate_space
from planner.specs.job import SearchSpec


def supported_space(pricer: Pricer, search: SearchSpec) -> Space:
    """The space of a job, its open fields without values that rest on such an exchange."""
    context = pricer.rules_context
    domains = domains_of(context, search)
    lacking = {one.name for one in unmeasured_mechanisms(pricer.calibration, pricer)}
    values = {name: domain.values for name, domain in domains.by_field.items()}
    far = FAR_EXPERTS * pricer.cluster.fabric[0].gpus
    methods = tuple(
        method
        for method in values["cp_method"]
        if method not in lacking
        and f"cp {method}" not in lacking
        and not (method == "ulysses" and "short ulysses" in lacking)
    )

    def long_enough(degree: object) -> bool:
        assert isinstance(degree, int)
        return "short cp" not in lacking or degree * CUT <= pricer.training.seq_len

    left: dict[str, Values] = {
        "moe_dispatcher": tuple(
            name for name in values["moe_dispatcher"] if f"dispatcher {name}" not in lacking
        ),
        "cp_method": methods,
        "cp": tuple(one for one in values["cp"] if one == 1 or (methods and long_enough(one))),
    }
    if f"ep over more than {FAR_EXPERTS} nodes" in lacking:
        left["ep"] = tuple(one for one in values["ep"] if isinstance(one, int) and one <= far)
    by_field = {
        name: replace(domain, values=left[name]) if left.get(name) and not domain.given else domain
        for name, domain in domains.by_field.items()
    }
    return enumerate_space(context, Domains(by_field=by_field, splits=domains.splits))
