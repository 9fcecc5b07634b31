"""A model that follows its data: the product that ties jobs, serving and receiver together."""
