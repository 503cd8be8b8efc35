"""Priorities and progress of jobs, reports to be sent, and hosts that are kept out

Revision: 0008, after 0007.
"""

import sqlalchemy as sa

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NEW = {
    "tasks": (
        ("priority", sa.Integer(), False, "0"),
        ("pool", sa.Text(), True, None),
        ("wants_gpus", sa.Integer(), True, None),
        ("standing", sa.JSON(), True, None),
        ("notify_at", sa.DateTime(timezone=True), True, None),
        ("notified", sa.Integer(), False, "0"),
    ),
    "probes": (("priority", sa.Integer(), False, "0"), ("devices", sa.Integer(), True, None)),
}


def upgrade() -> None:
    for table, columns in NEW.items():
        with op.batch_alter_table(table) as batch:
            for name, kind, nullable, default in columns:
                batch.add_column(sa.Column(name, kind, nullable=nullable, server_default=default))
    op.create_index("ix_probes_pool_state", "probes", ["pool", "state"])
    op.create_table(
        "quarantined_hosts",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("found_by", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("pool", "host", name="pk_quarantined_hosts"),
    )


def downgrade() -> None:
    op.drop_table("quarantined_hosts")
    op.drop_index("ix_probes_pool_state", "probes")
    for table, columns in NEW.items():
        with op.batch_alter_table(table) as batch:
            for name, *_ in columns:
                batch.drop_column(name)
