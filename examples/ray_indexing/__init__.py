"""Fill a store on a Ray cluster."""
