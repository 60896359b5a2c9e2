"""What this build of attn_ext is."""

version: str
torch_version: str
compiler: str
