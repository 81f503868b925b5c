"""The sum of a product's parts over the ranks of a tensor-parallel group, with what follows it."""
