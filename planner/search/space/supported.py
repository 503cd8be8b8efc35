"""The space without exchanges that no run made (`calibration.mechanisms.Mechanism.leads`)."""

from dataclasses import replace

from planner.calibration.basis import unmeasured_mechanisms
from planner.calibration.mechanisms import FAR_EXPERTS
from planner.cost.price import Pricer
from planner.search.space.domains import Domains, Values, domains_of
from planner.search.space.enumerate import Space, enumerate_space
from planner.specs.job import SearchSpec


def supported_space(pricer: Pricer, search: SearchSpec) -> Space:
    """The space of a job, its open fields without values that rest on such an exchange."""
    context = pricer.rules_context
    domains = domains_of(context, search)
    lacking = {one.name for one in unmeasured_mechanisms(pricer.calibration, pricer)}

    def without(name: str) -> Values:
        values = domains.by_field[name].values
        if name == "moe_dispatcher":
            return tuple(value for value in values if f"dispatcher {value}" not in lacking)
        if name == "ep" and f"ep over more than {FAR_EXPERTS} nodes" in lacking:
            most = FAR_EXPERTS * pricer.cluster.fabric[0].gpus
            return tuple(value for value in values if isinstance(value, int) and value <= most)
        if name == "cp_method" and "short ulysses" in lacking:
            return tuple(value for value in values if value != "ulysses")
        return values

    by_field = {
        name: domain if domain.given else replace(domain, values=without(name) or domain.values)
        for name, domain in domains.by_field.items()
    }
    return enumerate_space(context, Domains(by_field=by_field, splits=domains.splits))
