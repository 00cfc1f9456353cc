"""Retrieved texts into markers: at what ratio, within what budget."""
