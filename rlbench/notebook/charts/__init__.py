"""One chart, drawn by plotly or as SVG."""
