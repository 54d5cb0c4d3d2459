__version__ = "0.2.0"
# All routes of this version of the HTTP API are below it; later releases only add to them.
API = "/v1"
