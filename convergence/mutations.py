"""Faults that the suite must catch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str


@dataclass
class MutationResult:
    name: str
    caught: bool


MUTATIONS: tuple[Mutation, ...] = ()


def run_mutations(device: str, live: object, names: object) -> list[MutationResult]:
    return []
